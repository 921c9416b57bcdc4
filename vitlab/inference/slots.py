"""Places in the host's memory for batches on their way to a GPU and back, so that the host fills one while the GPU
computes another.

The memory is pinned: a copy from or to any other makes the host wait for all that the GPU has to do before it.

Shapes: b images, h and w their height and width, D values of an image.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

SLOTS = 3  # as many batches as are under way at most


class Event(Protocol):
    """What the host waits for: that of torch.cuda."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Pending:
    """The values of a batch that is under way."""

    def __init__(self, values: Tensor, done: Event) -> None:
        self.place, self.done = values, done
        self.found: Tensor | None = None
        self.collecting = threading.Lock()

    def collect(self) -> Tensor:
        """Wait for the values (b, D); from then on they are outside of the slot."""
        with self.collecting:
            if self.found is None:
                self.done.synchronize()
                self.found = self.place.clone()
            return self.found


class Slot:
    """Memory for one batch: bytes of images, here and on the device, and the values that come back."""

    def __init__(self, images: int, shape: torch.Size, values: Tensor, device: torch.device, done: Event) -> None:
        pinned = device.type == "cuda"
        size = images * shape.numel()
        self.shape, self.done = shape, done
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.there = torch.empty(size, dtype=torch.uint8, device=device)
        self.values = torch.empty(images, values.shape[1], dtype=values.dtype, pin_memory=pinned)
        self.pending: Pending | None = None

    def send(self, pixels: Sequence[Tensor]) -> Tensor:
        """Images (3, h, w) as one tensor (b, 3, h, w) on the device, or soon.

        A decoded image has its three channels together, and turning that around costs more than all else here: it is
        left to the device. All images are one call of torch: after each, this thread waits for the interpreter if
        another one is busy.
        """
        together = pixels[0].permute(1, 2, 0).is_contiguous()
        channels, height, width = self.shape
        shape = (len(pixels), height, width, channels) if together else (len(pixels), *self.shape)
        size = len(pixels) * self.shape.numel()
        here, there = (memory[:size].view(shape) for memory in (self.bytes, self.there))
        torch.stack(list(pixels), out=here.permute(0, 3, 1, 2) if together else here)
        there.copy_(here, non_blocking=True)
        return there.permute(0, 3, 1, 2) if together else there

    def fetch(self, values: Tensor) -> Pending:
        """Let values (b, D) on the device come back."""
        place = self.values[: len(values)]
        place.copy_(values, non_blocking=True)
        self.done.record()
        self.pending = Pending(place, self.done)
        return self.pending

    def empty(self) -> None:
        """Collect the values that are still in it."""
        if self.pending is not None:
            self.pending.collect()
            self.pending = None


class Slots:
    """Slots that take turns; a batch that was not collected when its slot's turn comes again is, then."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.turn = device, 0
        self.slots: list[Slot | None] = [None] * SLOTS

    def take(self, images: Tensor, values: Tensor) -> Slot:
        """The next one, with room for such images (b, 3, h, w) and values (b, D)."""
        self.turn = (self.turn + 1) % SLOTS
        slot = self.slots[self.turn]
        if slot is not None:
            slot.empty()
        if slot is None or len(slot.values) < len(values):
            slot = Slot(len(images), images.shape[1:], values, self.device, self.event())
            self.slots[self.turn] = slot
        return slot

    def event(self) -> Event:
        return torch.cuda.Event()
