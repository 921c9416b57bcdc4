"""A training step as one CUDA graph: recorded once and then launched whole, so that a small model need not wait for
the host to launch its kernels one by one.

What changes from step to step goes through tensors that stay in place: the batch, the learning rate, the generator's
seed and all that the optimizer keeps.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from vitlab.data.loader import Batch

WARM = 3  # steps before the recording, in which compilers, libraries and the optimizer set themselves up

Found = tuple[Tensor, Tensor]  # a step's loss and its gradient's norm


class GraphedStep:
    """Calls a step that leaves no gradients behind; from the fourth time on it replays its recording."""

    def __init__(self, step: Callable[[Batch], Found]) -> None:
        self.step = step
        self.calls = 0
        self.aside = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()

    def __call__(self, batch: Batch) -> Found:
        self.calls += 1
        if self.calls <= WARM:
            return self.warm(batch)
        if self.calls == WARM + 1:
            self.record(batch)
        for field in dataclasses.fields(Batch):
            getattr(self.batch, field.name).copy_(getattr(batch, field.name))
        self.graph.replay()
        loss, norm = self.found
        return loss.clone(), norm.clone()  # the next replay overwrites them

    def warm(self, batch: Batch) -> Found:
        """A plain step, on a stream of its own: what is recorded must not hang on work of the default one."""
        self.aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aside):
            found = self.step(batch)
        torch.cuda.current_stream().wait_stream(self.aside)
        return found

    def record(self, batch: Batch) -> None:
        """Nothing is computed; a thread that pins memory for the loader may go on meanwhile."""
        self.batch = Batch(**{f.name: getattr(batch, f.name).clone() for f in dataclasses.fields(Batch)})
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.found = self.step(self.batch)
