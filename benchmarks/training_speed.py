"""How fast the training step is on one GPU, piece by piece: python benchmarks/training_speed.py --out speed.jsonl

Its parts can be chosen (--only): the attention kernels alone, checked against float64 and timed beside torch's own,
over block sizes; vitlab's own training step, plain, with the working copy, and with the kernels too; timm's model in a
plain loop with the same optimizer. Every result is a line of JSON, written as soon as it is there; what fails becomes a
line with the error, and the rest goes on. `--only seeds paths` trains 300 steps from scratch: three seeds of the plain
path, and each fast path; with --data on real images. Several processes can share them, as no speed is measured.
"""

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.data.open import open_data
from vitlab.data.source import ArraySource, Data
from vitlab.device import sound_kernels
from vitlab.kernels import fp8_rounding
from vitlab.kernels.install import use_kernels
from vitlab.training import trainer as trainer_module
from vitlab.training.objectives import softmax_loss
from vitlab.training.parallel import process_group
from vitlab.training.recipe import make_recipe
from vitlab.training.setup import prepare_run, training_lengths
from vitlab.training.trainer import Trainer

CLASSES, SIZE = 1000, 224
SHAPES = {"B/16": (256, 197, 12, 64), "L/16": (128, 197, 16, 64)}  # images, tokens, heads, head width
CHECKED = ((3, 64, 6, 64), (3, 197, 12, 64), (2, 196, 3, 64), (4, 50, 2, 32), (2, 65, 6, 48), (1, 256, 2, 64))
PEERS = {"B/16": "vit_base_patch16_224", "L/16": "vit_large_patch16_224"}
WARM_UP, ROUNDS, STEPS = 6, 3, 12
ALL = ("copy", "kernels")  # the fast pieces: working_copy.py, and all of install.py
DEVICE = "cuda"
LOSSES = 20  # steps whose losses are compared


class Report:
    """Lines of JSON on the screen and in a file, and a clock."""

    def __init__(self, out: Path, limit: float) -> None:
        self.out, self.began, self.limit = out, time.monotonic(), limit

    def add(self, **row: Any) -> None:
        line = json.dumps({"at": round(time.monotonic() - self.began, 1), **row})
        print(line, flush=True)
        with self.out.open("a") as file:
            file.write(line + "\n")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that may fail, or not begin any more, without the others."""
        try:
            if time.monotonic() - self.began > self.limit:
                raise TimeoutError(f"not begun: {self.limit:g} s are over")
            yield
        except Exception as error:
            self.add(part=name, error=f"{type(error).__name__}: {error}"[:800], trace=traceback.format_exc()[-1500:])


# ---- the machine


def describe_machine(report: Report) -> None:
    import triton

    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    speed = 2 * n**3 / milliseconds(torch.mm, a, b) / 1e9
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cudnn": torch.backends.cudnn.version()}
    report.add(part="machine", gpu=torch.cuda.get_device_name(), matmul_tflops=round(speed), **versions)


def milliseconds(act: Callable[..., Any], *arguments: Any) -> float:
    """Median time of a call on the device."""
    from triton.testing import do_bench

    return float(do_bench(lambda: act(*arguments), warmup=20, rep=80, return_mode="median"))


# ---- attention alone


def reference(qkv: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Values and gradient in float64."""
    x = qkv.double().requires_grad_()
    q, k, v = x.permute(2, 0, 3, 1, 4)
    y = ((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)
    return y.detach(), torch.autograd.grad(y, x, dy.double())[0]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def fused(qkv: Tensor) -> Tensor:
    """What the plain model computes."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def backends() -> dict[str, Any]:
    from torch.nn.attention import SDPBackend

    return {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def check_attention(report: Report) -> None:
    """Errors of the kernels against float64, beside those of the plain path, at several sizes and strides."""
    from vitlab.kernels import attention as kernels

    for images, tokens, heads, width in CHECKED:
        name = f"{images}x{tokens}x{heads}x{width}"
        with report.part(f"check {name}"):
            torch.manual_seed(tokens)
            qkv = torch.randn(images, tokens, 3, heads, width, device="cuda", dtype=torch.bfloat16)
            dy = torch.randn(images, tokens, heads, width, device="cuda", dtype=torch.bfloat16)
            y, gradient = reference(qkv, dy)
            x = qkv.clone().requires_grad_()
            plain = fused(x)
            plain_gradient = torch.autograd.grad(plain, x, dy)[0]
            row = {"plain": distance(plain, y), "plain_gradient": distance(plain_gradient, gradient)}
            own, lse = kernels.triton_forward(qkv, kernels.FORWARD)
            row["triton"] = distance(own, y)
            cudnn, cudnn_lse = kernels.cudnn_forward(qkv)
            row["cudnn"], row["cudnn_lse"] = distance(cudnn, y), distance(cudnn_lse, lse.double())
            strange = qkv.transpose(1, 3).contiguous().transpose(1, 3)  # other strides
            row["strides"] = distance(kernels.triton_forward(strange, kernels.FORWARD)[0], y)
            for rows in (64, 128):
                blocks = kernels.Blocks(rows, 8 if tokens > 128 else 4)
                with report.part(f"check {name} {blocks}"):
                    found = kernels.triton_backward(dy, qkv, own, lse, blocks)
                    row[f"{rows}_gradient"] = distance(found, gradient)
            report.add(part="check", shape=name, **{key: float(f"{value:.3g}") for key, value in row.items()})


def time_attention(report: Report, model: str) -> None:
    """Milliseconds of a layer's attention, forward and backward; the fastest blocks are used from then on."""
    from torch.nn.attention import sdpa_kernel

    from vitlab.kernels import attention as kernels

    images, tokens, heads, width = SHAPES[model]
    qkv = torch.randn(images, tokens, 3, heads, width, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(images, tokens, heads, width, device="cuda", dtype=torch.bfloat16)
    for name, backend in backends().items():
        with report.part(f"{model} {name}"), sdpa_kernel(backend):
            x = qkv.clone().requires_grad_()
            forward = milliseconds(fused, qkv)
            y = fused(x)
            backward = milliseconds(torch.autograd.grad, y, x, dy, True)
            report.add(part="attention", model=model, kernel=name, forward=forward, backward=backward)
    with report.part(f"{model} cudnn with sums"):
        report.add(part="attention", model=model, kernel="op", forward=milliseconds(kernels.cudnn_forward, qkv))
    for rows, warps, stages in ((64, 4, 1), (64, 4, 2), (64, 8, 1), (128, 8, 1), (128, 8, 2)):
        blocks = kernels.Blocks(rows, warps, stages)
        with report.part(f"{model} forward {blocks}"):
            forward = milliseconds(kernels.triton_forward, qkv, blocks)
            report.add(part="attention", model=model, kernel="triton", blocks=vars(blocks), forward=forward)
    own, lse = kernels.triton_forward(qkv, kernels.FORWARD)
    times: dict[kernels.Blocks, float] = {}
    for rows, warps, stages in BACKWARD:
        blocks = kernels.Blocks(rows, warps, stages)
        with report.part(f"{model} backward {blocks}"):
            times[blocks] = milliseconds(kernels.triton_backward, dy, qkv, own, lse, blocks)
            report.add(part="attention", model=model, kernel="triton", blocks=vars(blocks), backward=times[blocks])
    best = min(times, key=lambda blocks: times[blocks])
    report.add(part="attention", model=model, kernel="triton", best=vars(best), backward=times[best])
    kernels.backward_blocks = lambda tokens: best


# rows, warps and stages; no rows below 64: see attention.py
BACKWARD = (
    *((rows, 8, stages) for rows, stages in ((128, 2), (128, 3), (64, 1), (64, 2), (64, 3))),
    *((rows, 16, stages) for rows, stages in ((128, 1), (128, 2), (64, 2))),
)


def time_rounding(report: Report, model: str) -> None:
    """Milliseconds of the kernel that rounds an MLP's matrices, by its tile and warps."""
    images, tokens, heads, width = SHAPES[model]
    rows, columns = images * tokens, 4 * heads * width
    x, u = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scale = torch.ones((), device="cuda")
    for tile, warps in itertools.product(((64, 64), (128, 64), (64, 128), (128, 128), (256, 32)), (4, 8)):
        with (
            report.part(f"{tile} {warps}"),
            patch.object(fp8_rounding, "TILE", tile),
            patch.object(fp8_rounding, "WARPS", warps),
        ):
            times = {
                what: milliseconds(fp8_rounding.round_turned, x, u, scale, what, what == "slope")
                for what in ("plain", "gelu", "slope")
            }
            found = {what: round(time, 3) for what, time in times.items()}
            report.add(part="rounding", model=model, tile=tile, warps=warps, **found)


# ---- vitlab's own step


def random_data(images: int = 512) -> Data:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (images, SIZE, SIZE, 3), dtype=np.uint8)
    classes = tuple(f"class {i}" for i in range(CLASSES))
    train = ArraySource("random", pixels, rng.integers(0, CLASSES, images), classes)
    return Data("random", train, ArraySource("random", pixels[:8], np.arange(8), classes))


def real_data(name: str) -> Data:
    """Images of one size from a data set, with as many classes as the others have: nothing is compiled twice."""
    train = open_data(name).train
    pixels = np.stack([np.asarray(train.image(index)) for index in range(len(train))])
    classes = tuple(f"class {i}" for i in range(CLASSES))
    images, few = (ArraySource("real", pixels[:many], train.truth[:many], classes) for many in (len(train), 8))
    return Data("real", images, few)


@contextmanager
def make_trainer(model: str, settings: dict[str, Any], data: Data | None = None) -> Iterator[Trainer]:
    recipe = make_recipe(model, "random", **{"steps": 10_000, "validation": 0, "seed": 1, **settings})
    with tempfile.TemporaryDirectory() as spare, process_group(DEVICE) as cluster:
        data = data or random_data()
        setup = prepare_run(recipe, Path(spare) / "run", cluster, resume=False, data=data, trial=True)
        with sound_kernels(cluster.device, *training_lengths(setup)), closing(Trainer(setup, cluster)) as trainer:
            yield trainer
            trainer.graphed = None  # or its memory would be counted with the next one's


def time_training(report: Report, model: str, name: str, fast: tuple[str, ...], **settings: Any) -> None:
    """Images per second of vitlab's step with some of the fast pieces."""
    batch = SHAPES[model][0]
    settings = {"batch": batch, "micro": batch, "lr": 1e-4, "weight_decay": 0.1, **settings}
    with report.part(f"{model} {name}"), chosen(fast), make_trainer(model, settings) as trainer:
        began = time.monotonic()
        losses = [float(trainer.step(step)[0]) for step in range(LOSSES)]
        compiled = time.monotonic() - began
        loaded = rate(lambda: trainer.step(LOSSES), batch)
        trainer.batches = itertools.cycle([next(trainer.batches)])
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        speeds = [rate(lambda: trainer.step(LOSSES), batch) for _ in range(ROUNDS)]
        memory = torch.cuda.max_memory_allocated() / 1e9
        row = {"images_per_second": round(statistics.median(speeds), 1), "spread": [round(x, 1) for x in speeds]}
        row |= {"with_loader": round(loaded, 1), "peak_gb": round(memory, 2), "held_gb": held_gb()}
        row |= {"first_steps_s": round(compiled, 1)}
        report.add(part="train", model=model, name=name, **row, losses=[round(x, 5) for x in losses])
        if name in ("all", "all, fp8"):
            profile(report, model, name, lambda: trainer.step(LOSSES))
    forget()


Runs = list[tuple[str, tuple[str, ...], str, int]]  # name, fast pieces, precision, seed
PLAIN: Runs = [("plain", (), "bfloat16", seed) for seed in (1, 2, 3)]
FAST: Runs = [("all", ALL, "bfloat16", 1), ("all, fp8", ALL, "fp8", 1), ("all, fp8, graph", ALL, "fp8", 1)]


def compare_losses(report: Report, model: str, name: str | None, runs: Runs) -> None:
    """Losses of 300 steps from scratch."""
    data = real_data(name) if name else None
    batch, steps = SHAPES[model][0], 300
    settings = {"batch": batch, "micro": batch, "lr": 3e-4, "warmup": 30, "weight_decay": 0.1, "steps": steps}
    for name, fast, precision, seed in runs:
        graph = {"cuda_graph": name.endswith("graph")}
        with (
            report.part(f"{model} losses {name} {seed}"),
            chosen(fast),
            make_trainer(model, {**settings, "precision": precision, "seed": seed, **graph}, data) as trainer,
        ):
            losses = torch.stack([trainer.step(step)[0] for step in range(steps)]).tolist()
            means = [round(statistics.mean(losses[start : start + 25]), 4) for start in range(0, steps, 25)]
            report.add(part="losses", model=model, name=name, seed=seed, means_of_25=means)
        forget()


@contextmanager
def chosen(fast: tuple[str, ...]) -> Iterator[None]:
    """Train with some of the fast pieces."""
    copies = property(lambda self: "copy" in fast and self.bf16)
    install = use_kernels if "kernels" in fast else lambda module, compiled: None
    with (
        patch.object(Trainer, "uses_working_copy", copies),
        patch.object(trainer_module, "use_kernels", install),
    ):
        yield


def rate(step: Callable[[], Any], batch: int) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return batch * STEPS / (time.perf_counter() - began)


def held_gb() -> float:
    """What the process holds at most, without what only compiling needed; the peak leaves out recorded graphs."""
    return round(torch.cuda.max_memory_reserved() / 1e9, 2)


def profile(report: Report, model: str, name: str, step: Callable[[], Any]) -> None:
    """Where the time of a step is, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with report.part(f"{model} {name} profile"):
        with record(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(2):
                step()
            torch.cuda.synchronize()
        events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:30]
        table = [[e.key[:90], round(e.self_device_time_total / 2000, 3), e.count // 2] for e in events]
        total = sum(e.self_device_time_total for e in found.key_averages()) / 2000
        report.add(part="profile", model=model, name=name, milliseconds=round(total, 2), kernels=table)


def forget() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


# ---- timm


def time_timm(report: Report, model: str) -> None:
    import timm

    batch = SHAPES[model][0]
    peer = timm.create_model(PEERS[model], num_classes=CLASSES).cuda()
    compiled = torch.compile(peer, dynamic=False)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    images = torch.randn(batch, 3, SIZE, SIZE, device="cuda")
    targets = F.one_hot(torch.randint(CLASSES, (batch,), device="cuda"), CLASSES).float()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = softmax_loss(compiled(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    speeds = [rate(step, batch) for _ in range(ROUNDS)]
    row = {"images_per_second": round(statistics.median(speeds), 1), "spread": [round(x, 1) for x in speeds]}
    memory = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    report.add(part="train", model=model, name=f"timm {timm.__version__}", **row, peak_gb=memory, held_gb=held_gb())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("training_speed.jsonl"))
    parser.add_argument(
        "--only", nargs="*", default=["check", "attention", "rounding", "train", "fp8", "graph", "timm", "pieces"]
    )
    parser.add_argument("--models", nargs="*", default=list(SHAPES))
    parser.add_argument("--data", help="what the losses are of; random images without it")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no further part begins")
    options = parser.parse_args()
    report = Report(options.out, options.limit)
    with report.part("machine"):
        describe_machine(report)
    if "check" in options.only:
        with report.part("check"):
            check_attention(report)
    for model in options.models:
        if "attention" in options.only:
            with report.part(f"{model} attention"):
                time_attention(report, model)
        if "rounding" in options.only:
            with report.part(f"{model} rounding"):
                time_rounding(report, model)
        if "train" in options.only:
            time_training(report, model, "all", ALL)
            time_training(report, model, "plain", ())
        if "fp8" in options.only:
            time_training(report, model, "all, fp8", ALL, precision="fp8")
        if "graph" in options.only:
            time_training(report, model, "all, fp8, graph", ALL, precision="fp8", cuda_graph=True)
            time_training(report, model, "all, graph", ALL, cuda_graph=True)
        if "timm" in options.only:
            with report.part(f"{model} timm"):
                time_timm(report, model)
            forget()
        if "pieces" in options.only and model == "B/16":
            time_training(report, model, "copy", ("copy",))
            time_training(report, model, "all, dropout", ALL, dropout=0.1)
        if "seeds" in options.only:
            compare_losses(report, model, options.data, PLAIN)
        if "paths" in options.only:
            compare_losses(report, model, options.data, FAST)


if __name__ == "__main__":
    main()
