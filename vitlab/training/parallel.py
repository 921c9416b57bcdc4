"""One model on many devices. Everything about it is here: the model and the loop's arithmetic know nothing of it.

Started by torchrun, each process finds its rank in the environment; started plainly, there is one process. The
model is wrapped by one function: activation checkpointing, then compilation, then sharding.
"""

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from vitlab.device import pick_device
from vitlab.errors import UserError

Parallel = Literal["ddp", "fsdp"]
T = TypeVar("T")

# Seconds in which Python's lock is free at the end. Gloo's threads outlive their group and need the lock to drop the
# last tensors; one that asks for it when Python has already ended aborts the process.
LETTING_GO = 0.3


@dataclass(frozen=True)
class Cluster:
    """This process among the others."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in every one of them."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def agree(self, choose: Callable[[], T]) -> T:
        """What the first process chooses, in every one of them; where it cannot, all of them end."""
        if self.world == 1:
            return choose()
        found: list[tuple[T | None, UserError | None]] = [(None, None)]
        if self.first:
            try:
                found = [(choose(), None)]
            except UserError as error:
                found = [(None, error)]
        dist.broadcast_object_list(found)
        value, mistake = found[0]
        if mistake is not None:
            raise mistake if self.first else SystemExit(1)  # said once
        return cast(T, value)


@contextmanager
def process_group(device: str = "auto") -> Iterator[Cluster]:
    """This process as part of the run torchrun started, or alone; inside another `joined` it is that one."""
    place = pick_device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or dist.is_initialized():
        yield Cluster(place, dist.get_rank(), world) if world > 1 else Cluster(place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    # processes that torchrun starts anew would find the addresses of lost ones in its store: a page for each attempt
    store, rank, world = next(rendezvous("env://"))
    store = PrefixStore(f"attempt {attempt()}", store)
    kinds = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(kinds, store=store, rank=rank, world_size=world)
    try:
        yield Cluster(place, dist.get_rank(), world)
    except RuntimeError as error:
        if not lost(error):
            raise
        raise UserError(
            "another process of this run is gone, so it stops here; `torchrun --max-restarts 3` takes it up again by "
            f"itself, --resume by hand, both from the last checkpoint ({str(error).splitlines()[0]})"
        ) from error
    finally:
        dist.destroy_process_group()
        time.sleep(LETTING_GO)


def lost(error: RuntimeError) -> bool:
    """Whether an error says that the processes cannot reach each other any more."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection closed by peer" in str(error)


def attempt() -> int:
    """How often torchrun has started the processes anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def restarted() -> bool:
    """Whether this process takes up what another one, which was lost, had begun."""
    return attempt() > 0


def wrap(module: nn.Module, cluster: Cluster, *, recompute: bool, compiled: bool, parallel: Parallel) -> nn.Module:
    """The module as the loop calls it; parameters keep their names in the module itself, which is changed in place."""
    sharded = cluster.world > 1 and parallel == "fsdp"
    if recompute:
        for block in blocks(module):
            # the method is replaced on the instance, so that neither names nor types of modules change
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if compiled:
        for part in blocks(module) if sharded else [module]:  # sharding hooks would cut a whole graph to pieces
            part.compile()
    if cluster.world == 1:
        return module
    if not sharded:
        ids = [cluster.device.index] if cluster.device.type == "cuda" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch have another name for it
            return DistributedDataParallel(module, device_ids=ids, broadcast_buffers=False)
    mesh = dist.device_mesh.init_device_mesh(cluster.device.type, (cluster.world,))
    for block in blocks(module):
        fully_shard(block, mesh=mesh)
    # by default the outermost stays whole after a pass without gradients, and averages could not be swapped in
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return module


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated parts: a transformer's blocks and a ResNet's units."""
    from vitlab.models.axial import AxialBlock
    from vitlab.models.resnet import BiTUnit, StemUnit
    from vitlab.models.vit import Block

    inner = {part for m in module.modules() if isinstance(m, AxialBlock) for part in (m.rows, m.columns)}
    kinds = (AxialBlock, Block, BiTUnit, StemUnit)
    return [m for m in module.modules() if isinstance(m, kinds) and m not in inner]


@contextmanager
def gradient_sync(module: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are exchanged after the last micro-batch of a step only."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        yield
        return
    held: Any = nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync()
    with held:
        yield


def gather_full(tensor: Tensor) -> Tensor:
    """A tensor in one piece, gathered from the processes that hold its parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def place_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor where another one is: on its device, and in its parts if that one is in parts."""
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)
