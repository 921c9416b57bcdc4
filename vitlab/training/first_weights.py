"""The weights that fine-tuning starts from: those named, else public ones that fit the machine, else the box."""

from dataclasses import dataclass

import torch

from vitlab.errors import UserError
from vitlab.models.variants import Model
from vitlab.weights import box, hub, load

# On a GPU, DINOv2 in the largest size that has room: the bytes of memory that each asks for. At 224 pixels and a
# batch of 32 fine-tuning takes 13, 4.4 and 1.9 GB (`vitlab.cost`).
DINOV2 = {"facebook/dinov2-large": 20e9, "facebook/dinov2-base": 8e9, "facebook/dinov2-small": 0.0}
DINOV2_SIZE = 224  # pixels; the files have tables for 518, which take six times as many operations
# Elsewhere: the largest that the kind of machine fine-tunes in reasonable time.
HUB = {
    "cuda": "google/vit-base-patch16-224-in21k",
    "mps": "WinKawaks/vit-small-patch16-224",
    "cpu": "WinKawaks/vit-tiny-patch16-224",
}


@dataclass(frozen=True)
class Start:
    """Weights by their name, the model in them (None: from scratch), why these, and warnings."""

    name: str | None
    model: Model | None
    why: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """For the description of a run."""
        return "none: from scratch" if self.name is None else self.name + (f": {self.why}" if self.why else "")


def find_weights(start: str | None, device: torch.device) -> Start:
    """The weights asked for, else the default from the hub, else the model in the box; none at all only as "none"."""
    if start == "none":
        warning = "training from scratch: with few images, starting from weights is far better (--weights)"
        return Start(None, None, warnings=(warning,))
    if start is not None:
        return Start(start, load_start(start))
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    warnings: tuple[str, ...] = ()
    if device.type == "cuda" and hub.is_available(dinov2(memory)):
        name, why = choose_default(device.type, memory, online=True)
        try:
            return Start(name, load_start(name), why)
        except UserError as error:  # the network, the disk, or what the hub answers by now
            warnings = (f"{name} cannot be loaded, so older weights are: {error}",)
    name, why = choose_default(device.type, memory, online=False)
    try:
        return Start(name, load_start(name), why, warnings)
    except UserError as error:
        if box.is_there():
            warning = f"the model in the box is small, and others are better to start from, but {error}"
            why = "the small model of the package, as nothing can be downloaded; --weights names others"
            return Start(box.NAME, load_start(box.NAME), why, (*warnings, warning))
        raise UserError(
            f"there are no weights to start from ({error}); give some with --weights FILE (safetensors, npz, pth or a "
            f"run folder), or `hf download {name} --local-dir vit` on a machine with a network, copy the folder here "
            "and add --weights vit; --weights none trains from scratch, which is far worse with few images"
        ) from None


def choose_default(device: str, memory: float, *, online: bool) -> tuple[str, str]:
    """The hub id to start from on a kind of device, and why; `online` is whether DINOv2's files can be had."""
    if device != "cuda":
        return HUB[device], "small enough for this machine; --weights names others"
    if not online:
        return HUB[device], "as DINOv2 cannot be downloaded now; --weights names others"
    return dinov2(memory), f"DINOv2 (Apache-2.0) in the size for a GPU of {memory / 1e9:.0f} GB; --weights names others"


def dinov2(memory: float) -> str:
    """The largest DINOv2 that a GPU with this many bytes fine-tunes."""
    return next(name for name, least in DINOV2.items() if memory >= least)


def load_start(name: str) -> Model:
    size = DINOV2_SIZE if name in DINOV2 else None
    return load(name, image_size=size)
