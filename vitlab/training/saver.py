"""What a run saves: checkpoints/last to resume from, checkpoints/best, and the final model."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.card import Card
from vitlab.training import checkpoint
from vitlab.training.checkpoint import CheckpointMeta
from vitlab.training.parallel import Cluster
from vitlab.training.setup import RunSetup
from vitlab.weights.save import write_folder

if TYPE_CHECKING:
    from vitlab.training.sharded import ShardedWriter


class Saver:
    """Writes a run's weights and state. All processes call it together; unless the run is sharded, the first writes."""

    def __init__(self, setup: RunSetup, cluster: Cluster, *, sharded: bool) -> None:
        self.setup, self.cluster = setup, cluster
        self.writer = make_writer(cluster) if sharded else None

    def save(self, state: dict[str, Tensor], meta: CheckpointMeta, *, wait: bool) -> None:
        """Write checkpoints/last. A sharded run writes it in the background, unless it is to `wait`."""
        folder = checkpoint.last_checkpoint(self.setup.out)
        if self.writer is not None:
            self.writer.save(folder, state, meta)
            if wait:
                self.writer.wait()
        elif self.cluster.first:
            checkpoint.write_checkpoint(folder, state, meta)
        self.cluster.barrier()

    def check_background(self) -> None:
        """Raise the error of a checkpoint that was written in the background, if there is one."""
        if self.writer is not None:
            self.writer.check_pending()

    def save_best(self, weights: dict[str, Tensor], thresholds: tuple[float, ...] | None) -> None:
        """Write checkpoints/best: the model alone, as `vitlab.load` reads it."""
        if self.cluster.first:
            best = self.setup.out / "checkpoints" / "best"
            checkpoint.replace_folder(best, lambda new: self.write_model(new, weights, thresholds))
            shutil.rmtree(checkpoint.sibling(best, "old"), ignore_errors=True)
        self.cluster.barrier()

    def save_final(self, weights: dict[str, Tensor], thresholds: tuple[float, ...] | None) -> None:
        """Write the model into the run's folder itself: model.safetensors and config.json."""
        if self.cluster.first:
            with checkpoint.disk_errors(self.setup.out):
                self.write_model(self.setup.out, weights, thresholds)
        self.cluster.barrier()

    def write_model(self, folder: Path, weights: dict[str, Tensor], thresholds: tuple[float, ...] | None) -> None:
        setup = self.setup
        labels = None if setup.recipe.objective == "masked" else setup.data.classes
        card = Card(setup.preprocess, labels, setup.provenance or None, thresholds)
        weights = {name: tensor.float() for name, tensor in weights.items()}  # also those of a run in float64
        try:
            write_folder(setup.config, weights, card, folder, setup.adapter)
        except UserError as error:
            raise OSError(str(error)) from error  # `disk_errors` adds how to continue


def make_writer(cluster: Cluster) -> "ShardedWriter":
    from vitlab.training import sharded  # torch's checkpoints, which few runs need and which take a while to import

    return sharded.ShardedWriter(cluster)
