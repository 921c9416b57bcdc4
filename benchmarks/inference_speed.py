"""How fast inference is on one device: python benchmarks/inference_speed.py [--model RUN --images FOLDER] > speed.json

On a GPU: the engine in bf16 and in static fp8 beside timm, compiled, which take turns; one image through the engine,
from bytes in the host's memory too; the batcher in process. On a CPU: one image through the engine in float32, int8
and, if the processor has it, bf16, beside timm, eager, and the model as ONNX Runtime runs it. With --model and
--images, how often 8 bits give the best class of float32 on images they were not calibrated on and, on a GPU, how fast
that is. Weights are random but for that.
`--toy` is what a GPU does on a CPU: small models, timm's not compiled, and 8 bits emulated.
"""

import argparse
import json
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import vitlab
from vitlab.bench.cases import Case
from vitlab.bench.clock import Contestant, Row, own_compilations, race, warm_up
from vitlab.bench.compare import Terms, describe_machine, infer_call, release_memory
from vitlab.bench.peers import make_peer
from vitlab.cost import quick_cost
from vitlab.device import has_bf16, pick_device
from vitlab.export import int8_file
from vitlab.export.images import open_images
from vitlab.export.quantize import calibrate
from vitlab.export.scales_file import from_images
from vitlab.inference.calibration import largest_inputs
from vitlab.inference.engine import Engine
from vitlab.inference.half import find_half, multiplies_bf16
from vitlab.inference.int8 import Int8
from vitlab.inference.onnx_file import open_session, to_proto
from vitlab.inference.scales import Scales, weights_key
from vitlab.inference.traced import traceable
from vitlab.inference.values import margins
from vitlab.kernels.fp8 import has_float8
from vitlab.models.variants import Model, build
from vitlab.models.vit import ViT
from vitlab.prediction import Classifier
from vitlab.prediction.classifier import Scores
from vitlab.serving.batcher import Batcher, QueueFull
from vitlab.serving.garbage import keep_all

MODELS = (("B/16", 256), ("L/16", 128))
TOY = (("Ti/16", 2),)
PEER, BF16, FP8 = "timm", "engine", "engine fp8"
AGAIN = (0.05, 0.17)  # shares of images that are computed again in 16 bits: those of the box and of the real Ti/16
RUNTIME, FLOAT, INT8, HALF = "ONNX Runtime", "engine", "engine int8", "engine bf16"


@contextmanager
def part(found: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """A part of the result, which may fail without the others; it is printed as soon as it is there, too."""
    found[name] = {}
    try:
        yield found[name]
    except Exception as error:
        found[name]["error"] = f"{type(error).__name__}: {error}"[:800]
        found[name]["trace"] = traceback.format_exc()[-1500:]
    print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    release_memory()


def random_scales(model: ViT, images: Tensor, again: float) -> Scales:
    """For speed alone: all layers, and so much of these images is computed again."""
    pixels = torch.randint(0, 256, (4, 3, *model.config.image_size), dtype=torch.uint8)
    maxima = largest_inputs(model, pixels, images.device)
    scales = Scales(weights_key(model), maxima, 1.0, 4, False, len(maxima), 1.0, 0.0, 0.0, "float16")
    apart = margins(Engine(model, "logits", images.device, scales=scales)(images))
    return replace(scales, closer=float(apart.float().quantile(again)), again=again)


def throughput(case: Case, terms: Terms, found: dict[str, Any]) -> None:
    """Images per second, the median and all rounds, and the ratio to timm within the rounds."""
    device, images = terms.device, torch.randn(case.batch, 3, case.image_size, case.image_size, device=terms.device)
    parameters = quick_cost(case.config).parameters

    def engine(again: float | None = None) -> Callable[[], Tensor]:
        model = build(case.config).to(device).eval()
        assert isinstance(model, ViT)
        assert model.head is not None
        nn.init.normal_(model.head.weight, std=0.02)  # it begins at zero, where all classes are as close
        made = Engine(model, "logits", device, scales=None if again is None else random_scales(model, images, again))
        found[f"prepared, {again}"] = made.prepare(case.batch)
        return lambda: made(images)

    with own_compilations() if case.mode == "compiled" else nullcontext():
        makers: dict[str, Callable[[], Callable[[], object]]] = {
            PEER: lambda: infer_call(make_peer(PEER, case.config, parameters), case, terms),
            BF16: engine,
        }
        for again in AGAIN if has_float8(device) or device.type == "cpu" else ():
            makers[f"{FP8}, {again:.0%} again"] = partial(engine, again)
        ready = []
        for name, make in makers.items():
            call = make()
            ready.append(Contestant(name, "", call, warm_up(call, device, 0)))
        rounds = list(race(ready, device, rounds=terms.rounds, seconds=terms.seconds, alone=False))
        rows = {c.name: Row(c.name, "", tuple(case.batch * r[c.name] for r in rounds), None, ()) for c in ready}
        for name, row in rows.items():
            found[name] = {"images_per_second": row.median, "rounds": list(row.rates), "to_timm": row.ratio(rows[PEER])}
        if device.type == "cuda":
            found["kernels"] = {c.name: kernels(c.call) for c in ready}


def kernels(call: Callable[[], object], most: int = 12) -> list[tuple[str, float, int]]:
    """Where the time of a call is on a GPU: names, milliseconds and calls of kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    return [(event.key[:90], round(event.self_device_time_total / 1000, 3), event.count) for event in events[:most]]


def latency(case: Case, terms: Terms, found: dict[str, Any]) -> None:
    """Milliseconds of one image, waited for: normalized on the device, and as bytes of the host to probabilities."""
    device = terms.device
    model = build(case.config).to(device).eval()
    engine = Engine(model, "logits", device)
    image = torch.randn(1, 3, case.image_size, case.image_size, device=device)
    classifier = Classifier(model, str(device))
    found["prepared"] = [made.prepare(1) for made in (engine, classifier.engine)]
    pixels = pictures(1, case.image_size)
    calls = {"engine": lambda: engine(image), "bytes to probabilities": lambda: classifier.start(pixels)()}
    if classifier.engine.graphs is not None:  # what of it the recording takes by itself
        calls["recording from bytes"] = classifier.engine.graphs.recordings[1].graph.replay
    ready = [Contestant(name, "", call, warm_up(call, device, 0)) for name, call in calls.items()]
    rounds = list(race(ready, device, rounds=terms.rounds, seconds=terms.seconds, alone=True))
    for name in calls:
        found[name] = {"milliseconds": sorted(1000 / r[name] for r in rounds)}


def random_int8(model: Model) -> Int8:
    """For speed alone: all layers, and an agreement that nobody measured."""
    graph = traceable(model)
    assert isinstance(graph, ViT)
    assert isinstance(model, ViT)
    pixels = torch.randint(0, 256, (4, 3, *model.config.image_size), dtype=torch.uint8)
    scales, _ = calibrate(graph, pixels, model.card.preprocess)
    written = int8_file.write_graph(int8_file.features_graph(graph, model), scales, model)
    return Int8(weights_key(model), len(scales), (), 1.0, 4, separate=False, graph=written)


def on_processor(case: Case, terms: Terms, found: dict[str, Any]) -> None:
    """Milliseconds of one normalized image, and how many times as fast as timm, within the rounds and of the best."""
    device, image = terms.device, torch.randn(1, 3, case.image_size, case.image_size)
    model = build(case.config).eval()
    plain = open_session(to_proto(model, model, False).SerializeToString())
    engines = {FLOAT: Engine(model, "logits", device), INT8: Engine(model, "logits", device, scales=random_int8(model))}
    engines[FLOAT].prepare(1, thorough=False)
    calls: dict[str, Callable[[], object]] = {
        PEER: infer_call(make_peer(PEER, case.config, quick_cost(case.config).parameters), case, terms),
        RUNTIME: lambda: plain(image),
        FLOAT: lambda: engines[FLOAT](image),
        INT8: lambda: engines[INT8](image),
    }
    if multiplies_bf16():
        engines[HALF] = Engine(model, "logits", device, scales=find_half(model, device))
        calls[HALF] = lambda: engines[HALF](image)
    ready = [Contestant(name, "", call, warm_up(call, device, 0)) for name, call in calls.items()]
    rounds = list(race(ready, device, rounds=terms.rounds, seconds=terms.seconds, alone=True))
    rows = {name: Row(name, "", tuple(r[name] for r in rounds), None, ()) for name in calls}
    for name, row in rows.items():
        found[name] = {"milliseconds": 1000 / row.median, "rounds": sorted(1000 / rate for rate in row.rates)}
        found[name] |= {"to_timm": row.ratio(rows[PEER]), "best_to_timm": max(row.rates) / max(rows[PEER].rates)}
    found["chosen"] = ", ".join(engines[FLOAT].names.values()) or "eager"


def pictures(count: int, side: int) -> list[Tensor]:
    """Bytes with the channels of a pixel together, as decoders give them."""
    return [torch.randint(0, 256, (side, side, 3), dtype=torch.uint8).permute(2, 0, 1) for _ in range(count)]


def batched(case: Case, terms: Terms, found: dict[str, Any]) -> None:
    """Images per second through the batcher, from bytes to probabilities, from a queue that is always full."""
    classifier = Classifier(build(case.config), str(terms.device))
    found["prepared"] = classifier.engine.prepare(case.batch)
    keep_all()  # as the server does
    ends: list[tuple[float, int]] = []

    def run(items: Sequence[Tensor]) -> Callable[[], list[Scores]]:
        scores = classifier.start(items)
        return lambda: scores().each()

    def count(size: int, seconds: float) -> None:
        ends.append((time.perf_counter(), size))

    batcher: Batcher[Tensor, Scores] = Batcher(run, case.batch, queue=4 * case.batch, on_batch=count)
    waiting: deque[Future[Scores]] = deque()
    images, asked = pictures(64, case.image_size), 0
    while len(ends) < 3 or ends[-1][0] - ends[0][0] < terms.rounds * terms.seconds:
        try:
            waiting.append(batcher.submit(images[asked % len(images)]))
            asked += 1
        except QueueFull:
            waiting.popleft().result()
    for future in waiting:
        future.cancel()
    batcher.close(60)
    sizes = [size for _, size in ends[1:]]
    found["images_per_second"] = sum(sizes) / (ends[-1][0] - ends[0][0])
    found["images_per_batch"] = sum(sizes) / len(sizes)


def agreement(run: str, images: str, terms: Terms, found: dict[str, Any]) -> None:
    """Of the layers and images in 8 bits that calibration chooses, and how much faster than bf16 that is."""
    device, model = terms.device, vitlab.load(run)
    scales = from_images(model, images, device)
    found |= {"agreement": scales.agreement, "images": scales.images, "separate": scales.separate}
    found |= {"layers": len(scales.maxima), "of": scales.layers, "work": scales.work, "again": scales.again}
    found |= {"emulated": not has_float8(device)}
    batch = MODELS[0][1] if device.type == "cuda" else 2
    preprocess, model = model.card.preprocess, model.to(device).eval()
    # real ones, as the share of close calls is theirs
    pixels = open_images(images).sample(batch).pixels(model.config.image_size, preprocess).to(device)
    ready = []
    for name, one in ((BF16, None), (FP8, scales)):
        made = Engine(model, "logits", device, preprocess=preprocess, scales=one)
        found[f"{name} prepared"] = made.prepare(len(pixels))
        call = partial(made, pixels)
        ready.append(Contestant(name, "", call, warm_up(call, device, 0)))
    rounds = list(race(ready, device, rounds=terms.rounds, seconds=terms.seconds, alone=False))
    rows = [Row(c.name, "", tuple(len(pixels) * r[c.name] for r in rounds), None, ()) for c in ready]
    found |= {"images_per_second": {row.name: row.median for row in rows}, "to_bf16": rows[1].ratio(rows[0])}


def int8_agreement(run: str, images: str, found: dict[str, Any]) -> None:
    model = vitlab.load(run)
    assert isinstance(model, ViT)
    made = int8_file.from_images(model, images)
    found |= {"agreement": made.agreement, "images": made.images, "separate": made.separate}
    found |= {"layers": made.layers, "floats": made.floats}


def on_gpu(given: argparse.Namespace, terms: Terms, found: dict[str, Any]) -> None:
    side, depth = (32, 1) if given.toy else (224, None)
    cases = [
        Case(name, "infer", "eager" if given.toy else "compiled", batch, side, depth)
        for name, batch in (TOY if given.toy else MODELS)
        if given.toy or name in given.models
    ]
    for case in cases if "throughput" in given.only else ():
        with part(found, case.model) as row:
            throughput(case, terms, row)
    if "latency" in given.only:
        with part(found, f"one image, {cases[0].model}") as row:
            latency(cases[0], terms, row)
    if "batcher" in given.only:
        with part(found, f"batcher, {cases[0].model}") as row:
            batched(cases[0], terms, row)
    if given.model and given.images:
        with part(found, f"agreement of fp8, {given.model}") as row:
            agreement(given.model, given.images, terms, row)


def on_cpu(given: argparse.Namespace, terms: Terms, found: dict[str, Any]) -> None:
    with part(found, "one image, B/16") as row:
        on_processor(Case("B/16", "latency", "eager", 1, 224, None), terms, row)
    if given.model and given.images:
        with part(found, f"agreement of int8, {given.model}") as row:
            int8_agreement(given.model, given.images, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--only", nargs="*", default=["throughput", "latency", "batcher"], help="parts, on a GPU")
    parser.add_argument("--models", nargs="*", default=[name for name, _ in MODELS], help="of these, on a GPU")
    parser.add_argument("--model", help="a run, a file of weights or a hub id, for the agreement of 8 bits")
    parser.add_argument("--images", help="a folder of images or a data set, for the agreement of 8 bits")
    parser.add_argument("--toy", action="store_true")
    given = parser.parse_args()
    device = pick_device("cpu" if given.toy else given.device)
    terms = Terms(device, torch.bfloat16 if has_bf16(device) else torch.float32, (PEER,), given.rounds, given.seconds)
    found: dict[str, Any] = {"machine": describe_machine(terms), "vitlab": vitlab.__version__}
    (on_gpu if given.toy or device.type != "cpu" else on_cpu)(given, terms, found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
