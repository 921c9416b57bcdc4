"""What a report is about: a run, its model and data, and how it was tested."""

import dataclasses
from dataclasses import dataclass

from vitlab.cost import BACKWARD, forward_flops
from vitlab.data.source import Data
from vitlab.evaluation.multi_result import MultiEvaluation
from vitlab.evaluation.result import Evaluation
from vitlab.models.config import ModelConfig, ResNetConfig
from vitlab.models.shown import shown_config
from vitlab.report.history import History
from vitlab.training.recipe import small_until
from vitlab.training.stages import Stages


@dataclass(frozen=True)
class Subject:
    """What the report is about; `data` is what the model was tested on.

    `parameters` and `flops` are those of the model and of its forward pass, `size` the bytes of its file.
    """

    run: str
    history: History
    config: ModelConfig
    data: Data
    parameters: int
    flops: int
    size: int
    stages: Stages | None = None  # of a run in stages

    @property
    def start(self) -> str | None:
        """The weights that training started from, if any."""
        return self.history.recipe.weights if self.stages is None else self.stages.weights

    @property
    def is_trained(self) -> bool:
        """Whether the model is that of the recipe, and not of a stage before it."""
        return self.stages is None or self.stages.kept

    @property
    def run_flops(self) -> int:
        """Operations of all training steps; a frozen body has no backward pass, low-rank updates half of one."""
        recipe, seen = self.history.recipe, self.steps * self.history.recipe.batch
        small = min(seen, small_until(recipe))  # images of the run's start that were smaller
        flops = self.flops * (seen - small)
        if small and recipe.small_size:
            flops += forward_flops(shown_config(self.config, recipe.small_size)) * small
        return flops * (1 if recipe.freeze == "body" else 2 if recipe.lora else 1 + BACKWARD)

    @property
    def answer_flops(self) -> int:
        """Operations of classifying an image: unlike in training, of all its patches."""
        if isinstance(self.config, ResNetConfig) or not self.config.patch_dropout:
            return self.flops
        return forward_flops(dataclasses.replace(self.config, patch_dropout=0.0))

    @property
    def steps(self) -> int:
        """Those that were done: a run may end early."""
        steps = self.history.steps
        return int(steps[-1]) if len(steps) else self.history.recipe.steps or 0


@dataclass(frozen=True)
class Tested:
    """The scores on some images, how long the test took, and which split they are."""

    scores: Evaluation | MultiEvaluation
    seconds: float
    split: str = "test"

    @property
    def is_multi_label(self) -> bool:
        return isinstance(self.scores, MultiEvaluation)
