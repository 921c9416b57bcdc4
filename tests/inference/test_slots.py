"""Batches on their way to a device and back: each has its own values, and a slot is emptied before its next use."""

import pytest
import torch
from torch import Tensor

from vitlab.inference.slots import SLOTS, Slot, Slots

CPU = torch.device("cpu")


class Waited:
    """An event on a machine without a GPU, where a copy is done when it returns."""

    def __init__(self) -> None:
        self.recorded = self.waited = 0

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    monkeypatch.setattr(Slots, "event", lambda self: Waited())
    return Slots(CPU)


def photos(count: int, *, together: bool) -> list[Tensor]:
    """Images (3, 4, 5), with the channels of a pixel together, as decoders give them, or each channel by itself."""
    found = [torch.randint(0, 256, (4, 5, 3), dtype=torch.uint8).permute(2, 0, 1) for _ in range(count)]
    return found if together else [image.contiguous() for image in found]


def room(images: int) -> tuple[Tensor, Tensor]:
    return torch.empty(images, 3, 4, 5, dtype=torch.uint8), torch.empty(images, 2)


def test_images_arrive_in_any_layout(slots: Slots) -> None:
    for together in (True, False):
        pixels = photos(3, together=together)
        assert torch.equal(slots.take(*room(4)).send(pixels), torch.stack(pixels))


def test_a_batch_keeps_its_values_when_its_slot_is_used_again(slots: Slots) -> None:
    pending = []
    for number in range(3 * SLOTS):
        slot = slots.take(*room(2))
        slot.send(photos(2, together=True))
        pending.append(slot.fetch(torch.full((2, 2), float(number))))
    assert [float(one.collect()[0, 0]) for one in pending] == list(range(3 * SLOTS))
    assert pending[0].collect() is pending[0].collect()


def test_a_larger_batch_gets_a_larger_slot_and_a_smaller_one_uses_it(slots: Slots) -> None:
    first = [slots.take(*room(1)) for _ in range(SLOTS)]
    kept = first[0].fetch(torch.ones(1, 2))
    larger: list[Slot] = [slots.take(*room(8)) for _ in range(SLOTS)]
    assert not set(map(id, first)) & set(map(id, larger))
    assert isinstance(first[0].done, Waited)
    assert first[0].done.waited == 1  # before its memory was given up
    assert torch.equal(kept.collect(), torch.ones(1, 2))
    assert [slots.take(*room(1)) for _ in range(SLOTS)] == larger
    assert torch.equal(larger[0].fetch(torch.ones(3, 2)).collect(), torch.ones(3, 2))
