"""The largest batch of which a training step fits in the memory of a device: tried on a GPU, elsewhere by count."""

import gc
from collections.abc import Callable

import torch

from vitlab.cost import STATE, cost
from vitlab.device import has_bf16, out_of_memory, synchronize
from vitlab.models.config import ModelConfig
from vitlab.models.variants import Model, build
from vitlab.training.setup import free_bytes

MOST = 16_384  # images of a batch, at which the search ends
SMALL = 1 / 32  # of the free memory, which a batch takes that says enough about larger ones


def largest_batch(config: ModelConfig, device: torch.device, most: int = MOST) -> int:
    """The largest batch, up to `most`, whose forward and backward pass fit beside weights and AdamW's state; 0: none.

    On a GPU batches are tried, and the answer is at most a sixteenth too small. On a CPU, where too large a batch would
    stop the machine, it is what fits in half of the memory by the bytes that `vitlab.cost` counts.
    """
    if device.type != "cuda":
        return count_batch(config, free_bytes(device), most)
    model = build(config).to(device).train()
    kept = [torch.zeros_like(p) for p in model.parameters() for _ in range(2)]  # AdamW's moments
    try:
        return search(lambda batch: fits(model, device, batch), most, expect(model, device, most))
    finally:
        kept.clear()
        free_cache()


def count_batch(config: ModelConfig, memory: float, most: int) -> int:
    """Images whose activations, in float32, fit in so many bytes beside the weights and AdamW's state."""
    found = cost(lambda: build(config))
    return max(0, min(most, int((memory - STATE * found.parameters) // (2 * found.activation_bytes))))


def search(fits: Callable[[int], bool], most: int, guess: int = 1) -> int:
    """The largest number up to `most` that fits, or a little less: none more than a sixteenth larger does.

    From a guess it goes up or down by a sixteenth, then by steps that double, to the first that is on the other side.
    """
    good, bad = 0, most + 1
    size, step = min(max(1, guess), most), max(1, guess // 16)
    while good < size < bad:
        if fits(size):
            good, size = size, min(size + step, most)
        else:
            bad, size = size, max(1, size - step)
        step *= 2
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def expect(model: Model, device: torch.device, most: int) -> int:
    """About how many images fit on a GPU, by those of small batches: each further image needs as much."""
    torch.cuda.empty_cache()
    batch, before = 1, 0
    while True:
        free, allocated = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        if not fits(model, device, batch):
            return batch // 2
        used = torch.cuda.max_memory_allocated(device) - allocated
        if batch >= most or used > SMALL * free:
            each = max(1, (used - before) // max(1, batch // 2))
            return batch + int(free - used) // each
        batch, before = 2 * batch, used


def fits(model: Model, device: torch.device, batch: int) -> bool:
    """Whether a training pass of a batch runs through; it leaves nothing in memory."""
    try:
        images = torch.zeros(batch, 3, *model.config.image_size, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=has_bf16(device)):
            loss = model(images).float().sum()
        loss.backward()
        synchronize(device)
        return True
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
    finally:
        images = loss = None  # type: ignore[assignment]
        model.zero_grad(set_to_none=True)
        free_cache()


def free_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()
