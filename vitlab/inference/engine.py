"""One way to run a model without gradients, for predictions, evaluation and the server.

The model itself is the plain path: it runs until something faster is ready, and wherever nothing is. What is faster,
and how it is made, is of `graphs.py` on a GPU and of `processor.py` on a CPU. Each is compared with the plain path
before it is used; if it differs, or cannot be made, the plain path stays. So it does once the model has changed.

Shapes: b images, h and w the model's height and width, D the width of the features, or the number of classes.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitlab.data.transforms import normalize
from vitlab.device import cpu_threads, has_bf16, out_of_memory
from vitlab.inference.int8 import EightBits, Int8
from vitlab.inference.values import ValuesOf, What, margins
from vitlab.kernels.fp8 import E4M3
from vitlab.models.config import Preprocess
from vitlab.models.guest import Guest, Measured
from vitlab.models.variants import Model
from vitlab.text import brief

if TYPE_CHECKING:
    from vitlab.inference.graphs import Graphs
    from vitlab.inference.slots import Pending

log = logging.getLogger("vitlab")

Run = Callable[[Tensor], Tensor]
Tail = Callable[[Measured, Tensor], Tensor]
# How far the values of a fast path may be off, as a share of the largest value: rounding in another order.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05, E4M3: 0.1}
SMALLEST = 1e-12  # largest value, where all are zero
ANY = 0  # in place of a batch: any size

FEW = 8  # images that take a GPU hardly longer than one
SOME = 2.0  # close calls expected in a batch, from which on it hardly ever has none
PARTS = 4  # recordings at most that a batch is divided over
WAITS = 0.05  # seconds of an image, below which a CPU that serves needs nothing faster
CLOSING = 5.0  # seconds that are waited for a compiler, which cannot be stopped


def unchanged(model: Measured, values: Tensor) -> Tensor:
    return values


class Engine:
    """Computes values (b, D) of normalized images (b, 3, h, w) on the model's device, in its precision.

    A GPU that has bf16 computes in it where the weights are float32; others in the weights' own precision. With a
    `preprocess` images are bytes. A `tail` takes the model, or a copy of it, and the values, and returns others; the
    first of them, as many as the model has classes, are compared. With `scales` the plain path too is in 8 bits: in fp8
    on a GPU, by an int8 graph in ONNX Runtime on a CPU. Images whose two best classes are then closer than the scales
    say are computed once more, all in 16 bits, as rounding changes a best class only where another one is near.
    """

    def __init__(
        self,
        model: Measured,
        what: What,
        device: torch.device,
        *,
        preprocess: Preprocess | None = None,
        tail: Tail = unchanged,
        scales: EightBits | None = None,
    ) -> None:
        self.model, self.what, self.device = model, what, device
        self.preprocess, self.tail = preprocess, tail
        self.scales = None if isinstance(scales, Int8) else scales
        self.int8: Run | None = scales.runner() if isinstance(scales, Int8) else None
        self.dtype = next(model.parameters()).dtype
        self.counted = [p for p in model.parameters() if not p.is_inference()]  # torch counts changes of these
        self.half = self.scales is not None or (has_bf16(device) and self.dtype == torch.float32)
        self.half_dtype = torch.bfloat16 if self.scales is None else self.scales.dtype
        self.fast: dict[int, Run] = {}  # by the batch it is for, ascending; on a GPU at most that
        self.names = {} if self.int8 is None else {ANY: "ONNX Runtime, int8"}  # what runs which batch
        self.made_for: object = None  # the state of the model that these have
        self.graphs: Graphs | None = None
        self.too_large = 1 << 30  # images of a batch that does not fit
        self.warming: threading.Thread | None = None
        self.stop = threading.Event()
        self.quantized: Model | None = None  # what computes, where there are scales
        self.exact: Engine | None = None  # for close calls
        if self.scales is not None and self.scales.closer:
            rest = replace(self.scales, maxima={}, closer=0.0)
            self.exact = Engine(model, what, device, preprocess=preprocess, tail=tail, scales=rest)
            self.exact.stop = self.stop
        if scales is not None:
            self.begin()

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        values = self.once(images)
        return values if self.exact is None else self.look_again(images, values, self.exact)

    def look_again(self, images: Tensor, values: Tensor, exact: "Engine") -> Tensor:
        """Compute close calls once more, in place of their values (b, D).

        As many as are usual are computed before their number is known, so that a GPU has work while the host waits for
        it. Others that are among these keep their values: an answer does not depend on its batch.
        """
        apart = self.apart(values)
        close = apart < self.closer
        usual = self.usual(len(images))
        if usual in exact.fast:
            found = close.sum().to("cpu", non_blocking=True)
            counted = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
            rows = apart.topk(usual, largest=False).indices
            values[rows] = torch.where(close[rows, None], exact.once(images[rows]), values[rows])
            if counted is not None:
                counted.synchronize()
            if int(found) <= usual:
                return values
            close[rows] = False
        rest = close.nonzero()[:, 0]
        if len(rest):
            values[rest] = exact.once(images[rest])
        return values

    def apart(self, values: Tensor) -> Tensor:
        """How far the best class of each row of values (b, D) is above the next, (b,)."""
        logits = values[:, : self.model.config.classes]
        if self.what == "features" and self.tail is unchanged:
            assert self.quantized is not None
            assert self.quantized.head is not None
            logits = self.quantized.head(values)
        return margins(logits.float())

    @property
    def closer(self) -> float:
        return 0.0 if self.scales is None else self.scales.closer

    def usual(self, images: int) -> int:
        """How many close calls a batch of this size has, rounded up; 0 where it may well have none."""
        expected = 0.0 if self.scales is None else self.scales.again * images
        return min(images, math.ceil(expected / FEW) * FEW) if expected >= SOME else 0

    def once(self, images: Tensor) -> Tensor:
        """Values without a second look."""
        fast = self.fast
        if not fast or self.state() != self.made_for:
            return self.plain(images)
        if self.device.type != "cuda":
            return fast.get(len(images), fast.get(ANY, self.plain))(images)
        parts = divide(len(images), fast)
        if not parts:
            return self.plain(images)
        split = images.split([count for _, count in parts])
        found = [fast[batch](part) for (batch, _), part in zip(parts, split, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)

    @torch.inference_mode()
    def start(self, pixels: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Begin with images (3, h, w) of bytes in the host's memory; what is returned waits for their values (b, D).

        So the host can do something else while a GPU computes. Several may be under way.
        """
        first = self.start_once(pixels)
        return first if self.exact is None else partial(self.finish, pixels, first)

    def start_once(self, pixels: Sequence[Tensor]) -> Callable[[], Tensor]:
        fast, graphs = self.fast, self.graphs
        usable = graphs is not None and fast and self.state() == self.made_for
        parts = divide(len(pixels), fast) if usable else []
        if graphs is None or not parts:
            values = self.once(torch.stack(list(pixels)).to(self.device, non_blocking=True))
            return lambda: values.float().cpu()
        under_way, first = [], 0
        for batch, count in parts:
            under_way.append(graphs.start(batch, pixels[first : first + count]))
            first += count
        return partial(collect, under_way)

    @torch.inference_mode()
    def finish(self, pixels: Sequence[Tensor], first: Callable[[], Tensor]) -> Tensor:
        """Wait for values, and compute close calls again."""
        values = first()
        with cpu_threads(1):
            close = (self.apart(values) < self.closer).nonzero()[:, 0]
        if self.exact is not None and len(close):
            values[close] = self.exact.start([pixels[row] for row in close.tolist()])()
        return values

    @torch.inference_mode()
    def plain(self, images: Tensor) -> Tensor:
        """The model itself, eagerly."""
        return self.around(None)(images)

    def around(self, run: Run | None) -> Run:
        """All from images to values, by a way from normalized images to the model's; None: the model itself."""

        def complete(images: Tensor) -> Tensor:
            x = images if self.preprocess is None else normalize(images, self.preprocess)
            changed = self.state() != self.made_for
            model = self.model if self.quantized is None or changed else self.quantized
            own: Run = model.features if self.what == "features" else model
            if self.int8 is not None and not changed:
                own = partial(self.in_int8, self.int8)
            with torch.autocast(self.device.type, self.half_dtype, enabled=self.half):
                return self.tail(model, (run or own)(x.to(self.dtype)))

        return complete

    def in_int8(self, features: Run, x: Tensor) -> Tensor:
        """The model's values by the graph of its features; the head stays as it is."""
        values = features(x.float()).to(self.dtype)
        return values if self.what == "features" or self.model.head is None else self.model.head(values)

    def state(self) -> object:
        """What changes when the model's weights are changed in place, or its size of images is."""
        changes = sum([p._version for p in self.counted])
        return changes, self.model.config.image_size, getattr(self.model, "shown", None)

    # ---- making it faster

    def prepare(self, batch: int, *, thorough: bool = True) -> bool:
        """Make batches of this size faster, if this machine can; takes seconds to minutes. Whether it did."""
        try:
            found = self.make(batch, thorough=thorough)
        except Exception as error:  # compilers and exporters raise anything; the plain path needs none of them
            if ran_out(error):
                self.too_large = min(self.too_large, batch)
                torch.cuda.empty_cache()
                log.warning("batches of %d run eagerly: compiled, they do not fit in the GPU's memory", batch)
            elif not self.stop.is_set():  # else the model may have left the device already
                log.warning("the model runs eagerly: it cannot be compiled here (%s)", brief(error))
            return False
        if found is None:
            return False
        self.use(*found)
        for few in self.second_sizes(batch):
            if self.exact is not None and few not in self.exact.fast and not self.stop.is_set():
                self.exact.prepare(few)
        return True

    def second_sizes(self, batch: int) -> list[int]:
        """For how many close calls of a batch of this size there are graphs; `divide` puts them together."""
        return [] if self.exact is None else [size for size in (1, FEW, self.usual(batch)) if 0 < size <= batch]

    def use(self, batch: int, name: str, run: Run) -> None:
        """Use a fast path from now on; both tables are replaced at once, as other threads may be calling."""
        log.debug("batches of %s: %s", batch or "any size", name)
        self.names = {**self.names, batch: name}
        self.fast = dict(sorted({**self.fast, batch: run}.items()))

    def make(self, batch: int, *, thorough: bool) -> tuple[int, str, Run] | None:
        """What is faster than the plain path, compared with it: for which batch, its name and its call."""
        if isinstance(self.model, Guest):
            return None  # measured as its own library runs it
        self.begin()
        images = self.random_images(batch)
        if self.graphs is not None:
            self.graphs.record(images)
            run: Run = partial(self.graphs.run, batch)
            return (batch, "compiled, as a CUDA graph", run) if self.agrees(run, images) else None
        if self.device.type == "cpu" and self.scales is None and self.int8 is None:
            from vitlab.inference.processor import candidates, fastest

            ways = candidates(self.model, self.what, thorough=thorough)
            found = fastest(ways, self.around, images, self.plain, self.agrees)
            return None if found is None else (ANY if found.any_batch else batch, found.name, found.run)
        return None

    def random_images(self, batch: int) -> Tensor:
        shape = batch, 3, *self.model.config.image_size
        if self.preprocess is not None:
            return torch.randint(0, 256, shape, device=self.device, dtype=torch.uint8)
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def begin(self) -> None:
        """Before the first fast path is made: remember the model's state and copy it, where that is recorded."""
        if self.made_for is not None:
            return
        self.made_for = self.state()
        if isinstance(self.model, Guest) or (self.device.type != "cuda" and self.scales is None):
            return
        from vitlab.inference.graphs import Graphs, working_copy

        copied = working_copy(self.model, self.half, self.half_dtype)
        if self.scales is not None:
            from vitlab.inference.fp8 import use_scales

            use_scales(copied, self.model, self.scales)
            self.quantized = copied
        if self.device.type == "cuda":
            module = ValuesOf(copied, self.what, self.preprocess)
            self.graphs = Graphs(module, partial(self.tail, copied), self.device, self.half, self.half_dtype)

    @torch.inference_mode()
    def agrees(self, run: Run, images: Tensor) -> bool:
        """Whether a fast path gives the plain path's values, but for rounding."""
        compared = None if self.tail is unchanged else self.model.config.classes
        expected, found = (way(images).double()[:, :compared] for way in (self.plain, run))
        difference = float((found - expected).abs().max().nan_to_num(nan=torch.inf))
        share = TOLERANCE[E4M3 if self.scales is not None else torch.bfloat16 if self.half else self.dtype]
        allowed = share * max(SMALLEST, float(expected.abs().max()))
        if difference > allowed:
            log.warning("a compiled model differs by up to %.2g, and is not used", difference)
        return difference <= allowed

    # ---- in the background

    def warm_up(self, batches: Sequence[int], then: Callable[[], None] = lambda: None) -> None:
        """Make several batches faster in the background, one after the other; calls meanwhile take what is ready.

        `then` is called at its end.
        """
        batches = [batch for batch in batches if batch not in self.fast]
        if isinstance(self.model, Guest) or self.warming is not None or not batches:
            return
        work: Callable[[], None]
        if self.device.type == "cuda":
            many = ", ".join(map(str, batches))
            log.info("compiling the model for batches of %s in the background; until then it runs eagerly", many)
            work = partial(self.compile_all, batches)
        elif self.device.type == "cpu" and self.scales is None and self.int8 is None and self.seconds() > WAITS:
            work = self.export
        else:
            return
        self.begin()  # the copy is made here, while nothing else uses the model
        self.warming = threading.Thread(target=in_turn, args=(work, then), name="compiling", daemon=True)
        self.warming.start()

    def compile_all(self, batches: Iterable[int]) -> None:
        torch.cuda.set_device(self.device)
        for batch in batches:
            if self.stop.is_set():
                return
            # the first that fails is the last, unless smaller ones may fit
            if batch < self.too_large and not self.prepare(batch) and batch < self.too_large:
                return
        log.info("the model is compiled for batches of up to %d", max(self.fast, default=0))

    def export(self) -> None:
        """Use ONNX Runtime if it is there and faster for one image."""
        from vitlab.inference.processor import Candidate, fastest, has_onnx, onnx_runtime_apart

        if isinstance(self.model, Guest) or not has_onnx():
            return
        way = Candidate("ONNX Runtime", partial(onnx_runtime_apart, self.model, self.what, self.stop), any_batch=True)
        found = fastest(iter([way]), self.around, self.random_images(1), self.plain, self.agrees)
        if found is not None and not self.stop.is_set():
            self.use(ANY, found.name, found.run)
            log.info("from now on the model runs in ONNX Runtime, which is faster here")

    def seconds(self) -> float:
        """What the plain path takes for one image, once it has run."""
        image = self.random_images(1)
        self.plain(image)
        began = time.perf_counter()
        self.plain(image)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the work in the background: a process that ends while its compiler runs may crash."""
        if self.warming is None:
            return
        self.stop.set()
        self.warming.join(CLOSING)
        if not self.warming.is_alive():
            self.warming = None
            self.stop.clear()


def collect(under_way: "Sequence[Pending]") -> Tensor:
    """The values of a batch that was divided, (b, D)."""
    with cpu_threads(1):
        found = [pending.collect() for pending in under_way]
        return found[0] if len(found) == 1 else torch.cat(found)


def in_turn(*calls: Callable[[], None]) -> None:
    for call in calls:
        call()


def ran_out(error: BaseException | None) -> bool:
    """Whether this, or an error that led to it, is of memory: one within a recording ends it with another one."""
    return error is not None and (out_of_memory(error) or ran_out(error.__cause__ or error.__context__))


def divide(images: int, ready: Iterable[int]) -> list[tuple[int, int]]:
    """Which of the batches that are ready take how many of the images, in order; empty where eager is faster.

    The last may be filled up, by less than itself: a much larger one would take longer than the model as it is. A few
    images take as long as one.
    """
    batches, parts = sorted(ready), list[tuple[int, int]]()
    while images > 0 and len(parts) < PARTS:
        fitting = next((batch for batch in batches if images <= batch < max(2 * images, FEW + 1)), None)
        chosen = max((batch for batch in batches if batch <= images), default=None) if fitting is None else fitting
        if chosen is None:
            return []
        parts.append((chosen, min(images, chosen)))
        images -= chosen
    return parts if images <= 0 else []


def buckets(most: int) -> list[int]:
    """Batches of 1, 2, 4 ... `most`: the smallest first, which a single request waits for, then the largest."""
    powers = [1 << k for k in range(most.bit_length()) if 1 << k < most]
    return [*powers[:1], most, *powers[1:]]
