"""What this machine has: the device to run on, what it is good and bad at, how many processes may read images."""

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.errors import UserError


def pick_device(name: str) -> torch.device:
    """The device of this process: "auto" is the best there is; of several GPUs, each process takes its own.

    "cuda:1" is the second GPU, which then is torch's current one too.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps") or (device.type != "cuda" and device.index):
        raise UserError(f"there is no device '{name}'; write auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device={name}, and this machine has none; use device=auto")
    return pick_gpu(device, name) if device.type == "cuda" else device


def pick_gpu(device: torch.device, name: str) -> torch.device:
    """The GPU that was asked for, or this process's own where no number was given; UserError if it is not there."""
    if not torch.cuda.is_available():
        raise UserError(f"device={name}, and torch sees no GPU here; use device=auto")
    if device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    count = torch.cuda.device_count()
    if device.index >= count:
        there = "only cuda:0 is" if count == 1 else f"cuda:0 to cuda:{count - 1} are"
        raise UserError(f"there is no device '{name}': {there} here; choose one, or use device=auto")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"device={name} is one GPU for all processes; use device=cuda, and each takes its own")
    torch.cuda.set_device(device)  # for what takes no device: streams, graphs, generated kernels
    return device


def pick_workers(device: torch.device) -> int:
    """Processes that read images: a process's share of the cores; on a CPU the model needs most of them itself."""
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(16, cores - 1) if device.type == "cuda" else cores // 4


def has_bf16(device: torch.device) -> bool:
    """Only where the hardware has it; emulated, as on most CPUs, it takes minutes an image."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device, float64 as float32, without waiting: a plain copy would let the device finish first."""
    tensor = torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)
    return tensor.to(device, non_blocking=True)


def free_device() -> None:
    """Give a GPU's memory back to the processes that share it, and forget what was compiled for the last model: torch
    compiles one function for eight models, and runs it uncompiled for any other."""
    if torch.cuda.is_available():
        torch.compiler.reset()
        gc.collect()
        with suppress(RuntimeError):  # after some errors a GPU answers nothing any more, and the first one is the cause
            torch.cuda.empty_cache()


QUEUED = 10  # steps that may wait in the device's queue where speed is measured: a queue of work is not work done


def synchronize(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def own_workspaces() -> Iterator[None]:
    """While a CUDA graph is recorded: let it allocate the workspaces of its matrix products itself, as its own memory.

    One from before belongs to the process, and torch may free it (it does when it records other graphs), after which a
    replay would write into the memory of others. One of the graph must not serve what runs outside of it.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def sound_kernels(device: torch.device, *tokens: int) -> Iterator[None]:
    """Without two kernels of cuDNN: its attention where the gradient is wrong, and convolutions that do not repeat.

    For sequences of 64, 192, 320 ... tokens the attention now and then gives a gradient of NaN on Hopper GPUs with
    torch 2.11 and later (pytorch issue 196678); seen here on an H200, with a healthy loss, every 500 steps or so. The
    other fused kernels are as fast.

    The weight gradient of a small patch convolution in float32 (`wgrad_alg0_engine`) differs from call to call by 1e-4,
    and after 100 steps two runs' weights by 6e-3. The deterministic ones are as fast (docs/reliability.md).
    """
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.deterministic
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(before[0] and all(length % 128 != 64 for length in tokens))
        torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before[0])
        torch.backends.cudnn.deterministic = before[1]


# Dense bf16 tensor throughput by the vendors' data sheets, operations per second.
PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """The device's peak speed, if it is a GPU of the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((speed for key, speed in PEAKS.items() if key in name), None)


SMALL = 3e7  # multiply-adds of a matrix product, below which a second thread saves nothing


def few_threads(operations: float) -> AbstractContextManager[None]:
    """One thread of torch for small products, of so many multiply-adds at most; numpy's threads do not follow it.

    Threads of a product wait for the last one. On a busy machine that is a turn of the scheduler each time, and many
    small products, as of an eigendecomposition, take twenty times as long as on one thread.
    """
    return cpu_threads(1 if operations < SMALL else None)


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# On the CPU torch has no type of its own for it; the last are oneDNN's words.
ON_CPU = ("DefaultCPUAllocator", "not enough memory", "Cannot allocate memory", "could not create a primitive")


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in ON_CPU)


@contextmanager
def memory_errors(doing: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not out_of_memory(error):
            raise
        raise UserError(f"out of memory while {doing}; {remedy}") from error
