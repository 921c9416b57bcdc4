"""`vitlab bench compare`: the same model in several packages, one beside the other.

All contestants of a case have the same shape, batch, precision and optimizer, are warmed up, and then take turns. In
training vitlab is there twice: with the plain step that every package gets, and with its own loop, the step of
`vitlab train`. Compiled inference has vitlab's engine too, which predictions and evaluation run on.
"""

import gc
import itertools
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.bench.cases import Case
from vitlab.bench.clock import (
    MATMUL,
    Contestant,
    Row,
    allocated,
    matmul,
    matmul_flops,
    own_compilations,
    race,
    warm_up,
)
from vitlab.bench.peers import PEERS, NotThere, make_peer, version_of
from vitlab.cost import quick_cost
from vitlab.data.loader import Batch
from vitlab.data.source import ArraySource, Data
from vitlab.device import has_bf16, pick_device, sound_kernels
from vitlab.errors import UserError
from vitlab.inference.engine import Engine
from vitlab.models.variants import build
from vitlab.text import brief, listed
from vitlab.training.parallel import process_group
from vitlab.training.recipe import make_recipe
from vitlab.training.setup import prepare_run
from vitlab.training.trainer import Trainer

OURS, ENGINE, LOOP, GRAPHED = "vitlab", "vitlab engine", "vitlab train", "vitlab train cuda_graph=true"
RATE, DECAY = 1e-4, 0.05  # of AdamW
ENDLESS = 10**6  # steps

Call = Callable[[], object]
Make = Callable[[ExitStack], Call]


@dataclass(frozen=True)
class Terms:
    """What is the same for all that is measured."""

    device: torch.device
    dtype: torch.dtype  # bfloat16 is mixed precision in training, and the weights' own in inference
    peers: tuple[str, ...]
    rounds: int
    seconds: float  # of a contestant's turn

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Outcome:
    """The measurements of a case, and why some contestants are not among them."""

    case: Case
    rows: tuple[Row, ...]
    matmul_flops: float  # per second, of large matrix products between the rounds
    left_out: tuple[str, ...]

    @property
    def best_peer(self) -> Row | None:
        return max((row for row in self.rows if row.name in PEERS), key=lambda row: row.median, default=None)


def make_terms(device: str, precision: str, peers: Iterable[str], rounds: int, seconds: float) -> Terms:
    """The terms by the words of the command line; raises UserError for a device or a precision that is not there."""
    place = pick_device(device)
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    known["auto"] = known["bfloat16" if has_bf16(place) else "float32"]
    if precision not in known:
        raise UserError(f"--precision must be {listed(known)}, not '{precision}'")
    return Terms(place, known[precision], tuple(peers), rounds, seconds)


# ---- contestants


def contestants(case: Case, terms: Terms) -> dict[str, Make]:
    """By name, what makes each contestant's call; what has to be closed later goes onto the stack."""
    config = case.config
    parameters = quick_cost(config).parameters
    step = train_call if case.what == "train" else infer_call

    def peer(name: str) -> Make:
        return lambda stack: step(make_peer(name, config, parameters), case, terms)

    makers: dict[str, Make] = {OURS: lambda stack: step(build(config), case, terms)}
    if case.what == "train":
        makers[LOOP] = lambda stack: loop_call(case, terms, stack, cuda_graph=False)
        if terms.device.type == "cuda":
            makers[GRAPHED] = lambda stack: loop_call(case, terms, stack, cuda_graph=True)
    elif case.mode == "compiled":
        makers[ENGINE] = lambda stack: engine_call(case, terms)
    return makers | {name: peer(name) for name in terms.peers}


def random_images(case: Case, terms: Terms) -> Tensor:
    return torch.randn(case.batch, 3, case.image_size, case.image_size, device=terms.device)


def random_labels(case: Case, terms: Terms) -> Tensor:
    return torch.randint(case.config.classes, (case.batch,), device=terms.device)


def train_call(model: nn.Module, case: Case, terms: Terms) -> Call:
    """The plain step: forward, backward, AdamW, zeros."""
    model = model.to(terms.device).train()
    fused = terms.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=fused)
    images, labels = random_images(case, terms), random_labels(case, terms)
    forward = torch.compile(model, dynamic=False) if case.mode == "compiled" else model

    def step() -> None:
        with torch.autocast(terms.device.type, torch.bfloat16, enabled=terms.dtype == torch.bfloat16):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def infer_call(model: nn.Module, case: Case, terms: Terms) -> Call:
    """The forward pass, with weights in the precision; compiled for one image it is a CUDA graph too."""
    model = model.to(terms.device, terms.dtype).eval()
    images = random_images(case, terms).to(terms.dtype)
    forward: Callable[[Tensor], Tensor] = model
    if case.mode == "compiled":
        graphed = case.what == "latency" and terms.device.type == "cuda"
        forward = torch.compile(model, dynamic=False, mode="reduce-overhead" if graphed else None)

    @torch.inference_mode()
    def call() -> Tensor:
        return forward(images)

    return call


@dataclass(frozen=True)
class EngineCall:
    """What predictions and evaluation run on, with a batch of images."""

    engine: Engine
    images: Tensor

    def __call__(self) -> Tensor:
        return self.engine(self.images)

    @property
    def how(self) -> str:
        """What runs the model."""
        return ", ".join(self.engine.names.values()) or "eager"


def engine_call(case: Case, terms: Terms) -> EngineCall:
    """The engine, prepared for the batch; on a CPU that may be the model as it is."""
    engine = Engine(build(case.config).to(terms.device).eval(), "logits", terms.device)
    if engine.half != (terms.dtype == torch.bfloat16):
        raise NotThere(f"computes in {'bfloat16' if engine.half else 'float32'} on this device")
    if not engine.prepare(case.batch) and terms.device.type == "cuda":
        raise NotThere("could not be compiled, and would be measured as the plain model")
    return EngineCall(engine, random_images(case, terms))


def loop_call(case: Case, terms: Terms, stack: ExitStack, *, cuda_graph: bool) -> Call:
    """The step of `vitlab train` on a batch that is in the device's memory."""
    recipe = make_recipe(
        case.model,
        "noise",
        image_size=(case.image_size, case.image_size),
        steps=ENDLESS,
        batch=case.batch,
        micro=case.batch,
        lr=RATE,
        weight_decay=DECAY,
        device=str(terms.device),
        precision=terms.precision,
        compile="yes" if case.mode == "compiled" else "no",
        cuda_graph=cuda_graph,
        workers=0,
        resident=False,
        **({} if case.depth is None else {"depth": case.depth}),
    )
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
    cluster = stack.enter_context(process_group(str(terms.device)))
    setup = prepare_run(recipe, folder, cluster, resume=False, data=noise(case.config.classes), trial=True)
    trainer = stack.enter_context(closing(Trainer(setup, cluster)))
    images, labels = random_images(case, terms), random_labels(case, terms)
    targets = F.one_hot(labels, case.config.classes).float()
    trainer.batches = itertools.repeat(Batch(images, labels, targets, labels))
    numbers = itertools.count()
    return lambda: trainer.step(next(numbers) % ENDLESS)


def noise(classes: int) -> Data:
    """A data set with classes, of which no image is read."""
    source = ArraySource("noise", np.zeros((2, 8, 8, 3), np.uint8), np.arange(2), tuple(map(str, range(classes))))
    return Data("noise", source, source, source)


# ---- measuring


def measure_case(case: Case, terms: Terms, advance: Callable[[int], None]) -> Outcome:
    """Let the contestants of a case take turns; `advance` is called after each of `count_parts` parts of the work."""
    ready: list[Contestant] = []
    left_out: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(sound(case, terms.device))
        stack.enter_context(own_compilations() if case.mode == "compiled" else nullcontext())
        for name, make in contestants(case, terms).items():
            try:
                ready.append(prepare(name, make, stack, terms.device))
            except NotThere as reason:
                left_out.append(f"{name} {reason}")
            except Exception as error:  # other packages and compilers raise anything; the others are still measured
                left_out.append(f"{name} failed ({type(error).__name__}): {brief(error)}")
            release_memory()
            advance(1)
        if not ready:
            raise UserError(f"nothing could be measured of {case.model}: {'; '.join(left_out)}")
        speeds = []
        running, alone = [*ready, matmul(terms.device, terms.dtype)], case.what == "latency"
        for of_round in race(running, terms.device, rounds=terms.rounds, seconds=terms.seconds, alone=alone):
            speeds.append(of_round)
            advance(1)
        products = [of_round[MATMUL] * matmul_flops(terms.device) for of_round in speeds]
        rows = tuple(make_row(c, [of_round[c.name] for of_round in speeds], products, case) for c in ready)
        ready.clear()
        running.clear()
    release_memory()
    return Outcome(case, rows, statistics.median(products), tuple(left_out))


def prepare(name: str, make: Make, stack: ExitStack, device: torch.device) -> Contestant:
    before = allocated(device)
    call = make(stack)
    how = call.how if isinstance(call, EngineCall) else ""
    return Contestant(name, version_of(name.partition(" ")[0]), call, warm_up(call, device, before), how)


def count_parts(case: Case, terms: Terms) -> int:
    return len(contestants(case, terms)) + terms.rounds


def make_row(contestant: Contestant, calls: list[float], products: list[float], case: Case) -> Row:
    cost = quick_cost(case.config)
    flops = cost.train_flops if case.what == "train" else cost.forward_flops
    rates = tuple(case.batch * rate for rate in calls)
    shares = tuple(rate * flops / product for rate, product in zip(rates, products, strict=True))
    return Row(contestant.name, contestant.version, rates, contestant.memory, shares, contestant.how)


@contextmanager
def sound(case: Case, device: torch.device) -> Iterator[None]:
    """Every contestant trains on kernels whose gradients are right."""
    with sound_kernels(device, *([case.config.training_length] if case.what == "train" else [])):
        yield


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- what it ran on


def describe_machine(terms: Terms) -> dict[str, Any]:
    """The machine and the versions."""
    device = terms.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "device": name,
        "precision": terms.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def cpu_name() -> str:
    """The processor by its own name; on ARM, Linux has numbers alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
