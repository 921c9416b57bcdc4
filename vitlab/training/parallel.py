"""One model on several devices. Neither the model nor the training step depends on how many there are.

Started by torchrun, each process finds its rank in the environment; started plainly, there is one process. The
model is wrapped by one function: activation checkpointing, then compilation, then sharding.
"""

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from vitlab.device import pick_device
from vitlab.errors import UserError
from vitlab.kernels.compiling import compile_in_place

Parallel = Literal["ddp", "fsdp"]
T = TypeVar("T")

# Seconds in which Python's lock is free at the end. Gloo's threads outlive their group and need the lock to drop the
# last tensors; one that asks for it when Python has already ended aborts the process.
SHUTDOWN_SECONDS = 0.3
PATIENCE = timedelta(days=7)  # of processes that wait for what the first one does alone, such as frozen features
waiting: list[dist.ProcessGroup] = []  # the group in which they wait


@dataclass(frozen=True)
class Cluster:
    """This process among those of the run: its device, its rank and the world size."""

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

    def join(self, items: list[T]) -> list[T]:
        """The items of all processes, by rank, in every one of them."""
        if self.world == 1:
            return items
        parts: list[list[T]] = [[] for _ in range(self.world)]
        dist.all_gather_object(parts, items)
        return [item for part in parts for item in part]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def agree(self, choose: Callable[[], T]) -> T:
        """What `choose` returns in the first process, in all of them; if it raises a UserError, all of them end."""
        if self.world == 1:
            return choose()
        shared: list[tuple[T | None, UserError | None]] = [(None, None)]
        try:
            shared = [(choose(), None)] if self.first else shared
        except UserError as error:
            shared = [(None, error)]
        dist.broadcast_object_list(shared, group=waiting[0])
        value, failure = shared[0]
        if failure is not None:
            raise failure if self.first else SystemExit(1)  # reported once
        return cast(T, value)


@contextmanager
def process_group(device: str = "auto") -> Iterator[Cluster]:
    """This process as part of the run torchrun started, or alone; nested, it is the group that is there already."""
    place = pick_device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or dist.is_initialized():
        yield Cluster(place, dist.get_rank(), world) if world > 1 else Cluster(place)
        return
    select_gpu(place)
    interruptible(lambda: join_group(place))
    try:
        yield Cluster(place, dist.get_rank(), world)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise UserError(
            "another process of this run is gone, so it stops here; `torchrun --max-restarts 3` resumes it "
            f"automatically, --resume by hand, both from the last checkpoint ({str(error).splitlines()[0]})"
        ) from error
    finally:
        waiting.clear()
        dist.destroy_process_group()
        time.sleep(SHUTDOWN_SECONDS)


def join_group(place: torch.device) -> None:
    """Initialize torch's default process group; waits for all processes of the run."""
    select_gpu(place)  # each thread has its own
    # restarted processes would find the addresses of lost ones in torchrun's store: each attempt has its own prefix
    store, rank, world = next(rendezvous("env://"))
    store = PrefixStore(f"attempt {restart_count()}", store)
    backends = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backends, store=store, rank=rank, world_size=world)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    waiting[:] = [cast(dist.ProcessGroup, group)]  # of all processes, so this one is in it


def select_gpu(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.set_device(place)


def interruptible(act: Callable[[], T]) -> T:
    """Call what may block in C++ for minutes; this thread waits in Python, where signal handlers run at once."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future.result()


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether an error means that the processes cannot reach each other any more."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection closed by peer" in str(error)


def restart_count() -> int:
    """How often torchrun has restarted the processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_first() -> bool:
    """Whether this is the first of the run's processes, also before their group is there."""
    return os.environ.get("RANK", "0") == "0"


def is_restarted() -> bool:
    """Whether torchrun started this process to resume the work of one that was lost."""
    return restart_count() > 0


def wrap_module(
    module: nn.Module, cluster: Cluster, *, recompute: bool, compiled: bool, parallel: Parallel
) -> nn.Module:
    """The module as a step calls it. The module itself is changed in place; its parameters keep their names."""
    sharded = cluster.world > 1 and parallel == "fsdp"
    if recompute:
        for block in repeated_blocks(module):
            # the method is replaced on the instance, so that neither names nor types of modules change
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if compiled:
        for part in repeated_blocks(module) if sharded else [module]:  # hooks of sharding would break up one graph
            compile_in_place(part)
    if cluster.world == 1:
        return module
    if not sharded:
        ids = [cluster.device.index] if cluster.device.type == "cuda" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch have another name for it
            return DistributedDataParallel(module, device_ids=ids, broadcast_buffers=False)
    from torch.distributed.fsdp import fully_shard  # takes a second, which runs in one process do not need

    mesh = dist.device_mesh.init_device_mesh(cluster.device.type, (cluster.world,))
    for block in repeated_blocks(module):
        fully_shard(block, mesh=mesh)
    # by default the outermost stays unsharded after a pass without gradients, and averages could not be swapped in
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return module


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """A transformer's blocks and a ResNet's units."""
    from vitlab.models.axial import AxialBlock
    from vitlab.models.resnet import BiTUnit, StemUnit
    from vitlab.models.vit import Block

    inner = {part for m in module.modules() if isinstance(m, AxialBlock) for part in (m.rows, m.columns)}
    kinds = (AxialBlock, Block, BiTUnit, StemUnit)
    return [m for m in module.modules() if isinstance(m, kinds) and m not in inner]


def gradient_sync(module: nn.Module, last: bool) -> AbstractContextManager[None]:
    """The context of a micro-batch's passes: gradients are exchanged after the last one of a step only."""
    if dist.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext()


def gather_full(tensor: Tensor) -> Tensor:
    """A complete tensor, gathered from the processes that hold its shards."""
    if not dist.is_initialized():  # without a group there are no shards
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def place_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor on the device of another one, and sharded if that one is."""
    if dist.is_initialized():
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
            return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)
