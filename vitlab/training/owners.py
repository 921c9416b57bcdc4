"""Sharded tensors, complete for a while: each in one process, its owner, so that the work on them is shared.

A process sends and receives about as much as it has shards, once each way; to gather everything everywhere would be
as much as the model has weights.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Owners:
    """The processes as owners of some tensors that are sharded along their first axis; they travel in `dtype`."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        mesh = cast("DTensor", tensors[0]).device_mesh
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), range(mesh.size())
        self.shapes = [tensor.shape for tensor in tensors]
        self.device, self.dtype = tensors[0].device, dtype
        self.owned: list[list[int]] = [[] for _ in self.ranks]  # by each process
        loads = [0] * mesh.size()
        for i, shape in enumerate(self.shapes):  # each to the process that has least so far
            least = loads.index(min(loads))
            self.owned[least].append(i)
            loads[least] += shape.numel()

    def collect(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The complete tensors that this process owns, from every process's shards of all of them."""
        sent = [[shards[i] for i in owned] for owned in self.owned]
        found = self.exchange(sent, [[self.shard_shape(i, rank) for i in self.owned[self.rank]] for rank in self.ranks])
        return [torch.cat(pieces) for pieces in zip(*found, strict=True)]

    def spread(self, complete: Sequence[Tensor]) -> list[Tensor]:
        """The inverse: this process's shards of all tensors, from the complete ones of their owners."""
        sent: list[list[Tensor]] = [[] for _ in self.ranks]
        for i, tensor in zip(self.owned[self.rank], complete, strict=True):
            pieces = tensor.split([self.shard_shape(i, rank)[0] for rank in self.ranks])
            for rank in self.ranks:
                sent[rank].append(pieces[rank])
        found = self.exchange(sent, [[self.shard_shape(i, self.rank) for i in owned] for owned in self.owned])
        placed = {
            i: x for owned, shards in zip(self.owned, found, strict=True) for i, x in zip(owned, shards, strict=True)
        }
        return [placed[i] for i in range(len(self.shapes))]

    def shard_shape(self, i: int, rank: int) -> torch.Size:
        """The shape of a process's shard of tensor i: equal ones, of which the last may be smaller or empty."""
        rows, *others = self.shapes[i]
        most = -(-rows // len(self.ranks))
        return torch.Size((max(0, min(most, rows - rank * most)), *others))

    def exchange(self, sent: list[list[Tensor]], shapes: list[list[torch.Size]]) -> list[list[Tensor]]:
        """Send tensors to each process, and receive from each those of the given shapes."""
        empty = torch.empty(0, device=self.device, dtype=self.dtype)
        out = torch.cat([empty, *(x.flatten().to(self.dtype) for tensors in sent for x in tensors)])
        sizes = [[shape.numel() for shape in row] for row in shapes]
        found = empty.new_empty(sum(map(sum, sizes)))
        counts = [sum(x.numel() for x in tensors) for tensors in sent]
        dist.all_to_all_single(found, out, [sum(row) for row in sizes], counts, group=self.group)
        parts = iter(found.split([size for row in sizes for size in row]))
        return [[next(parts).view(shape) for shape in row] for row in shapes]
