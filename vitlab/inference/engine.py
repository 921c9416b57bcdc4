"""One way to run a model without gradients, for predictions, evaluation and the server.

The model itself is the plain path: it runs until something faster is ready, and wherever nothing is. What is faster,
and how it is made, is of `graphs.py` on a GPU and of `processor.py` on a CPU. Each is compared with the plain path
before it is used; if it differs, or cannot be made, the plain path stays.

Shapes: b images, h and w the model's height and width, D the width of the features, or the number of classes.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from vitlab.device import has_bf16
from vitlab.models.guest import Guest, Measured
from vitlab.models.variants import Model
from vitlab.text import brief

log = logging.getLogger("vitlab")

What = Literal["features", "logits"]
Run = Callable[[Tensor], Tensor]
# How far the values of a fast path may be off, as a share of the largest value: rounding in another order.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}

FIRST = 5  # batches before the speed is known
PAYS = {"cuda": 120.0, "cpu": 900.0}  # seconds of the model's time left, from which preparing takes less than it saves


class Engine:
    """Computes values (b, D) of normalized images (b, 3, h, w) on the model's device, in its precision.

    A GPU that has bf16 computes in it where the weights are float32; others in the weights' own precision.
    """

    def __init__(self, model: Measured, what: What, device: torch.device) -> None:
        self.model, self.what, self.device = model, what, device
        self.dtype = next(model.parameters()).dtype
        self.half = has_bf16(device) and self.dtype == torch.float32
        self.fast: dict[int, Run] = {}  # by the batch it is for, ascending; on a CPU exactly that, else at most that
        self.names: dict[int, str] = {}  # what that is
        self.cast: Model | None = None  # what is compiled for a GPU
        self.warming: threading.Thread | None = None

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        run = self.find(len(images))
        return self.plain(images) if run is None else run(images.to(self.dtype))

    @torch.inference_mode()
    def plain(self, images: Tensor) -> Tensor:
        """The model itself."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return (self.model.features if self.what == "features" else self.model)(images.to(self.dtype))

    def find(self, images: int) -> Run | None:
        """What is ready for a batch: on a GPU the next larger one that is, whose rest is left empty."""
        fast = self.fast
        if self.device.type != "cuda":
            return fast.get(images)
        return next((run for batch, run in fast.items() if batch >= images), None)

    # ---- making it faster

    def prepare(self, batch: int) -> bool:
        """Make batches of this size faster, if this machine can; takes seconds to minutes. Whether it did."""
        try:
            found = self.make(batch)
        except Exception as error:  # compilers and exporters raise anything; the plain path needs none of them
            log.warning("the model runs eagerly: it cannot be compiled here (%s)", brief(error))
            return False
        if found is None:
            return False
        name, run = found
        log.debug("batches of %d: %s", batch, name)
        self.names = {**self.names, batch: name}
        self.fast = dict(sorted({**self.fast, batch: run}.items()))  # replaced at once: other threads may be calling
        return True

    def make(self, batch: int) -> tuple[str, Run] | None:
        """The name and the call of what is faster than the plain path for this batch, compared with it."""
        if isinstance(self.model, Guest):
            return None  # measured as its own library runs it
        images = torch.randn(batch, 3, *self.model.config.image_size, device=self.device, dtype=self.dtype)
        if self.device.type == "cuda":
            from vitlab.inference.graphs import GraphedForward, halved

            if self.cast is None:  # one copy for all batches
                self.cast = halved(self.model) if self.half else self.model
            run: Run = GraphedForward(self.cast, self.what, images, self.half)
            return ("compiled, as a CUDA graph", run) if self.agrees(run, images) else None
        if self.device.type == "cpu":
            from vitlab.inference.processor import fastest

            return fastest(self.model, self.what, images, self.plain, self.agrees)
        return None

    @torch.inference_mode()
    def agrees(self, run: Run, images: Tensor) -> bool:
        """Whether a fast path gives the plain path's values, but for rounding."""
        expected = self.plain(images).float()
        difference = float((run(images).float() - expected).abs().max().nan_to_num(nan=torch.inf))
        allowed = TOLERANCE[torch.bfloat16 if self.half else torch.float32] * max(1.0, float(expected.abs().max()))
        if difference > allowed:
            log.warning("a compiled model differs by up to %.2g, and is not used", difference)
        return difference <= allowed

    def warm_up(self, batches: Sequence[int]) -> None:
        """Prepare several batches in the background, one after the other; calls meanwhile take what is ready."""
        if self.device.type != "cuda":
            return  # a CPU would compile and answer at the same time, and gain little
        many = ", ".join(map(str, batches))
        log.info("compiling the model for batches of %s in the background; until then it runs eagerly", many)

        def work() -> None:
            torch.cuda.set_device(self.device)
            if all(self.prepare(batch) for batch in batches):  # the first that fails is the last
                log.info("the model is compiled for batches of up to %d", max(batches))

        self.warming = threading.Thread(target=work, name="compiling", daemon=True)
        self.warming.start()


class Payback:
    """Prepares the engine for the batches of a long job once some of them have shown that it pays.

    Compiling a ViT for a GPU takes 5 to 30 seconds and then saves a sixth of the model's time or more (on an H200: B/16
    from 8,800 to 10,700 images a second, L/16 from 3,050 to 3,600). On a CPU a minute of trying saves a tenth.
    """

    def __init__(self, engine: Engine, batch: int, images: int) -> None:
        self.engine, self.batch, self.left = engine, batch, images
        self.calls, self.fastest = 0, float("inf")  # seconds of an image

    def count(self, images: int, seconds: float) -> None:
        """Note that the model took so long for so many images; prepare the engine if it is time to."""
        self.calls, self.left = self.calls + 1, self.left - images
        self.fastest = min(self.fastest, seconds / max(1, images))
        if self.calls == FIRST and self.fastest * self.left > PAYS.get(self.engine.device.type, float("inf")):
            self.engine.prepare(self.batch)


def buckets(most: int) -> list[int]:
    """Batches of 1, 2, 4 ... `most`: the smallest first, which a single request waits for, then the largest.

    Above 64 there is one for every factor of four: torch compiles a function for eight shapes at most.
    """
    powers = [1 << k for k in range(0, most.bit_length(), 1 if most <= 64 else 2) if 1 << k < most]
    return [*powers[:1], most, *powers[1:]]
