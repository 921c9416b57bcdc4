"""From a folder of photos to the best classifier in the time there is: a head on frozen features, then fine-tuning."""

from vitlab.finetuning.finetune import finetune
from vitlab.finetuning.run_folder import Run

__all__ = ["Run", "finetune"]
