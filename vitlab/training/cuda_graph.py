"""A training step as one CUDA graph, recorded once and then launched as one, so that a small model need not wait for
the host to launch its kernels one by one.

What changes from step to step goes through tensors that stay in place: the batch, the learning rate, the generator's
seed and the optimizer's state.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from vitlab.data.loader import Batch
from vitlab.device import own_workspaces

WARM_UP = 3  # steps before the recording, in which compilers, libraries and the optimizer initialize themselves

StepResult = tuple[Tensor, Tensor]  # a step's loss and its gradient's norm


class GraphedStep:
    """Calls a step that leaves no gradients behind; from the fourth call on it replays a recording of it."""

    def __init__(self, step: Callable[[Batch], StepResult]) -> None:
        self.step = step
        self.calls = 0
        self.side_stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()

    def __call__(self, batch: Batch) -> StepResult:
        self.calls += 1
        if self.calls <= WARM_UP:
            return self.warm_up(batch)
        if self.calls == WARM_UP + 1:
            self.record(batch)
        for field in dataclasses.fields(Batch):
            getattr(self.batch, field.name).copy_(getattr(batch, field.name))
        self.graph.replay()
        loss, norm = self.result
        return loss.clone(), norm.clone()  # the next replay overwrites them

    def warm_up(self, batch: Batch) -> StepResult:
        """A plain step on a side stream: the recording must not depend on work of the default one."""
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            result = self.step(batch)
        torch.cuda.current_stream().wait_stream(self.side_stream)
        return result

    def record(self, batch: Batch) -> None:
        """Record the step without computing it; thread-local, as the loader's thread may pin memory meanwhile."""
        self.batch = Batch(**{f.name: getattr(batch, f.name).clone() for f in dataclasses.fields(Batch)})
        with own_workspaces(), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = self.step(self.batch)
