"""What this machine has: the device to run on, whether it computes in bf16, how many processes may read images."""

import os

import torch

from vitlab.config import UserError


def pick_device(name: str) -> torch.device:
    """The device of this process: "auto" is the best there is; of several GPUs, each process takes its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"there is no device '{name}'; write auto, cpu, cuda or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name}, and torch sees no GPU here; use device=auto")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def pick_workers(device: torch.device) -> int:
    """Processes that read images: a process's share of the cores; on a CPU the model needs most of them itself."""
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(16, cores - 1) if device.type == "cuda" else cores // 4


def has_bf16(device: torch.device) -> bool:
    """Only where the hardware has it; emulated, as on most CPUs, it takes minutes an image."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
