"""The test set, every image exactly once, over all processes."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from vitlab.data.loader import Batch
from vitlab.models.config import Size
from vitlab.training.objectives import Objective
from vitlab.training.parallel import Cluster


@torch.no_grad()
def measure(
    goal: Objective,
    module: nn.Module,
    batches: Iterable[Batch],
    spare: Callable[[], Batch],
    cluster: Cluster,
    passes: int,
) -> dict[str, float]:
    """The goal's report. Batches may differ in size and number from process to process.

    A sharded model gathers its weights from all processes in every pass, so each makes `passes` of them, the last
    on a `spare` image that counts for nothing.
    """
    sums: Tensor | None = None
    seen = 0
    for batch in batches:
        found = wide(goal.measure(module, batch))
        sums, seen = found if sums is None else sums + found, seen + 1
    while seen < passes or sums is None:
        found = wide(goal.measure(module, spare()))
        sums, seen = torch.zeros_like(found) if sums is None else sums, seen + 1
    return goal.report(cluster.sum(sums).tolist())


def wide(sums: Tensor) -> Tensor:
    """Float64, so that counts stay exact; MPS has none."""
    return (sums.cpu() if sums.device.type == "mps" else sums).double()


def blank(size: Size, device: torch.device) -> Batch:
    label = torch.zeros(1, dtype=torch.long, device=device)
    return Batch(torch.zeros(1, 3, *size, device=device), label, torch.zeros(1, 1, device=device), label)
