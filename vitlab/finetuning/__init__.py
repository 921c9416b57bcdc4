"""From a folder of photos to the best classifier in the time there is: a head on frozen features, then fine-tuning."""

from vitlab.finetuning.run import Finetuned, finetune

__all__ = ["Finetuned", "finetune"]
