"""The one loop, for pre-training and fine-tuning: steps, evaluation, checkpoints, and an end that leaves a model.

Everything random is a function of (seed, step), so a run that was stopped anywhere goes on as if nothing happened:
the loader's batches, the model's dropout (its generator is seeded before every micro-batch), the masks.
"""

import dataclasses
import gc
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from vitlab.cost import cost
from vitlab.data.loader import Batch
from vitlab.data.rng import keys
from vitlab.data.source import Data
from vitlab.device import cpu_threads, has_bf16, memory_errors, out_of_memory, peak_flops, sound_kernels
from vitlab.errors import Stopped, UserError
from vitlab.models.config import ViTConfig
from vitlab.models.variants import build
from vitlab.models.vit import ViT
from vitlab.signals import Interrupted, Signals, stoppable
from vitlab.terminal import warn
from vitlab.training import checkpoint, sharded
from vitlab.training.checkpoint import CheckpointMeta
from vitlab.training.cuda_graph import GraphedStep
from vitlab.training.lock import locked
from vitlab.training.masked import MaskedPatches, PredictPatches
from vitlab.training.measure import blank, measure
from vitlab.training.objectives import Classify, Objective, sigmoid_loss, softmax_loss
from vitlab.training.optim import Average, clip, learning_rate, make_optimizer, set_rate
from vitlab.training.parallel import Cluster, gather_full, gradient_sync, process_group, restarted, wrap
from vitlab.training.recipe import Recipe
from vitlab.training.recorder import Bar, Board, Log, last_report
from vitlab.training.setup import RunSetup, choose_micro, divisors, last, make_loaders, prepare_run
from vitlab.weights import save

LOG = "log.jsonl"


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: its folder, its last test report, and how long it took this time."""

    folder: Path
    report: dict[str, float]
    seconds: float
    first: bool  # of the run's processes
    data: Data  # it was trained and tested on


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    accept_data_changes: bool = False,
    console: Console | None = None,
    data: Data | None = None,
) -> TrainResult:
    """Run a recipe in the folder `out`; with `resume`, go on where it stopped."""
    began, out, resume = time.monotonic(), Path(out), resume or restarted()
    with (
        stoppable("stopped before the next step was done; the same command with --resume goes on") as signals,
        memory_errors("training", "set a smaller micro, batch, image_size or model, or recompute=true"),
        process_group(recipe.device) as cluster,
        locked(out, cluster),
        cpu_threads(recipe.threads),
    ):
        plan = prepare_run(recipe, out, cluster, resume=resume, data=data, accept=accept_data_changes)
        with sound_kernels(cluster.device, plan.config.length):
            run = Run(plan, cluster, console or Console(), signals)
            try:
                run.go()
            finally:
                run.close()
        if signals.number:  # during the last step or after it
            raise Stopped(signals.number, f"stopped; the run in {out} is complete, `vitlab report {out}` describes it")
        return TrainResult(out, run.report, time.monotonic() - began, cluster.first, plan.data)


class Run:
    def __init__(self, plan: RunSetup, cluster: Cluster, console: Console, signals: Signals | None = None) -> None:
        r = plan.recipe
        self.plan, self.recipe, self.cluster, self.signals = plan, r, cluster, signals or Signals()
        self.steps = r.steps or 0
        self.bf16 = r.precision == "bfloat16" or (r.precision == "auto" and has_bf16(cluster.device))
        self.dtype = torch.float64 if r.precision == "float64" else torch.float32
        self.core, self.goal = self.make_core()
        compiled = r.compile == "yes" or (r.compile == "auto" and cluster.device.type == "cuda")
        self.module = wrap(self.core, cluster, recompute=r.recompute, compiled=compiled, parallel=r.parallel)
        self.optimizer = make_optimizer(
            self.core,
            r.optimizer,
            weight_decay=r.weight_decay,
            betas=(r.beta1, r.beta2),
            momentum=r.momentum,
            recorded=r.cuda_graph and cluster.device.type == "cuda" and cluster.world == 1,
        )
        self.recorded: GraphedStep | None = None
        self.average = Average(self.core, r.ema) if r.ema else None
        self.saver = sharded.ShardedWriter(cluster) if self.sharded else None
        self.flops = 0
        facts = self.take_up()
        self.done, self.best, self.micro, self.tested = facts.step, facts.best, facts.micro, facts.tested
        self.changing = False  # whether weights are being changed right now
        self.bar = Bar(console, self.steps, self.done, shown=cluster.first)
        with checkpoint.disk_errors(plan.out):
            self.log = Log(plan.out / LOG, facts.log_bytes) if cluster.first else None
            self.board = Board(plan.out / "tensorboard", self.done) if cluster.first and r.tensorboard else None
        self.window: list[tuple[int, Tensor, Tensor]] = []  # steps not yet logged: their losses stay on the device
        self.report: dict[str, float] = {}
        self.clock = time.monotonic()
        self.loader, self.tester = make_loaders(plan, cluster, self.micro)
        self.batches = self.stream(self.done)

    # ---- getting ready

    def make_core(self) -> tuple[nn.Module, Objective]:
        """The module that learns, on its device, and what it learns."""
        model, r, config = self.plan.model(), self.recipe, self.plan.config
        core: nn.Module = model
        goal: Objective = Classify(sigmoid_loss if r.objective == "sigmoid" else softmax_loss)
        if r.objective == "masked":
            if not isinstance(model, ViT) or not isinstance(config, ViTConfig):
                raise UserError(f"masked patch prediction needs a transformer, and {r.model} is a ResNet")
            core, goal = MaskedPatches(model), PredictPatches(self.plan.preprocess, r.seed, config.grid, config.stride)
        if r.freeze == "body":
            for name, p in core.named_parameters():
                p.requires_grad_(name.startswith("head."))
        return core.to(self.cluster.device, self.dtype), goal

    def take_up(self) -> CheckpointMeta:
        """The state to continue from; at the very beginning, the micro-batch is chosen."""
        found = self.plan.found
        if found is None or found.facts.world != self.cluster.world:  # another share of the batch
            micro = choose_micro(self.plan, self.cluster, self.core, bf16=self.bf16)
        if found is None:
            return CheckpointMeta(step=0, log_bytes=0, micro=micro, best=None)
        for torn in found.torn:
            self.warn(f"passed over the checkpoint {torn}")
        pieces = sharded.in_pieces(found.folder)  # whatever this run writes itself
        state = sharded.load(found.folder, self.core) if pieces else checkpoint.load(found.folder)
        checkpoint.restore(state, self.core, self.optimizer, self.average)
        self.cluster.barrier()
        if self.cluster.first:
            checkpoint.tidy(last(self.plan.out), found.folder)
        return found.facts if found.facts.world == self.cluster.world else dataclasses.replace(found.facts, micro=micro)

    @property
    def sharded(self) -> bool:
        return self.module is self.core and self.cluster.world > 1

    def stream(self, step: int) -> Iterator[Batch]:
        """Micro-batches of this process, from a step on."""
        self.loader.batch = self.micro * self.cluster.world
        return map(self.cast, self.loader.batches(step * self.parts))

    def cast(self, batch: Batch) -> Batch:
        return batch if self.dtype == torch.float32 else dataclasses.replace(batch, images=batch.images.to(self.dtype))

    @property
    def parts(self) -> int:
        """Micro-batches of a step."""
        return self.recipe.batch // (self.micro * self.cluster.world)

    # ---- going

    def go(self) -> None:
        """Signals wait for the end of a step, except the first: it may compile for minutes and has nothing to save."""
        r, first = self.recipe, self.done
        with self.signals.later(), self.bar:
            if not self.tested:
                self.evaluate()
                self.save(wait=True)
            for step in range(first, self.steps):
                with self.signals.now() if step == first else nullcontext():
                    self.step(step)
                if self.saver is not None:
                    self.saver.check()
                self.done = done = step + 1
                stop = self.agreed(done)
                end = done == self.steps
                if end or stop or done % r.log_every == 0:
                    self.flush()
                if end or done % (r.evaluate_every or self.steps) == 0:
                    self.evaluate()
                if end or stop or done % r.checkpoint_every == 0:
                    self.save(wait=bool(end or stop))
                if stop and not end:
                    raise self.stopped(stop)
            self.finish()

    def stopped(self, number: int) -> Stopped:
        return Stopped(number, f"stopped at step {self.done} of {self.steps}, saved; continue with --resume")

    def agreed(self, done: int) -> int:
        """The signal to stop by, if any; many processes ask each other now and then, to stop at the same step."""
        if self.cluster.world == 1:
            return self.signals.number
        if done % self.recipe.log_every:
            return 0
        numbers = torch.zeros(self.cluster.world, dtype=torch.long)
        numbers[self.cluster.rank] = self.signals.number
        return int(self.cluster.sum(numbers).max())

    def step(self, step: int) -> None:
        set_rate(self.optimizer, self.rate(step))
        while (made := self.attempt(step)) is None:
            self.shrink(step)
        loss, norm = made
        if self.average is not None:
            self.average.update(step)
        self.window.append((step + 1, loss, norm))

    def attempt(self, step: int) -> tuple[Tensor, Tensor] | None:
        """Loss and norm of a step, or None where memory ran out.

        The error must be gone before the next attempt: its traceback holds the frames that hold the activations.
        """
        try:
            return self.replay(step) if self.recordable else (self.backward(step), self.move())
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return None

    def backward(self, step: int) -> Tensor:
        """Gradients of the whole batch, micro-batch by micro-batch; this process's mean loss."""
        total = torch.zeros((), device=self.cluster.device, dtype=self.dtype)
        for part in range(self.parts):
            batch = self.next_batch(step, part)
            with gradient_sync(self.module, last=part == self.parts - 1):
                total += self.add(batch, step)
        return total

    def replay(self, step: int) -> tuple[Tensor, Tensor]:
        """A step as one CUDA graph, once it is recorded."""
        if self.recorded is None:
            self.recorded = GraphedStep(lambda batch: (self.add(batch, step), self.move()))
        return self.recorded(self.next_batch(step, 0))

    @property
    def recordable(self) -> bool:
        r, c = self.recipe, self.cluster
        one = c.device.type == "cuda" and c.world == 1 and self.parts == 1
        # the host draws masks, and keeps the generator's state for activations made twice
        return r.cuda_graph and one and r.optimizer == "adamw" and r.objective != "masked" and not r.recompute

    def next_batch(self, step: int, part: int) -> Batch:
        """A micro-batch, with the model's generator set to where it belongs."""
        if not self.module.training:
            self.module.train()
        batch = next(self.batches)
        torch.manual_seed(draw_seed(self.recipe.seed, step, part, self.cluster.rank))
        return batch

    def add(self, batch: Batch, step: int) -> Tensor:
        """A micro-batch's share of the gradients, and of the loss."""
        with self.autocast():
            loss = self.goal.loss(self.module, batch, step) / self.parts
        loss.backward()
        return loss.detach()

    def move(self) -> Tensor:
        """Change the weights; the norm of the gradient, before it was clipped."""
        norm = clip(self.core.parameters(), self.recipe.clip)
        self.changing = True
        self.optimizer.step()
        self.changing = False
        self.optimizer.zero_grad()
        return norm

    def shrink(self, step: int) -> None:
        """Out of memory: a smaller micro-batch, and the step again from its beginning."""
        smaller = [d for d in divisors(self.micro) if d < self.micro]
        if not smaller or self.cluster.world > 1 or self.changing:  # half-changed weights cannot take the step again
            raise UserError(
                f"out of memory with micro-batches of {self.micro} images; set micro={smaller[0] if smaller else 1}, "
                "recompute=true, or a smaller image_size or model"
            )
        self.warn(f"out of memory with micro-batches of {self.micro} images; going on with {smaller[0]}")
        self.micro = smaller[0]
        self.recorded = None
        self.optimizer.zero_grad()
        self.batches = self.stream(step)
        self.tester.shrink(2 * self.micro)
        gc.collect()
        torch.cuda.empty_cache()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.cluster.device.type, torch.bfloat16, enabled=self.bf16)

    def warn(self, line: str) -> None:
        if self.cluster.first:
            warn(line)

    # ---- keeping records

    def flush(self) -> None:
        """Log the steps since the last time; a loss that is no number ends the run before it is saved."""
        if not self.window:
            return
        steps, losses, norms = zip(*self.window, strict=True)
        self.window = []
        values = torch.stack([torch.stack(losses), torch.stack([n.to(losses[0]) for n in norms])])
        values[0] = self.cluster.sum(values[0].clone()) / self.cluster.world
        values = values.double().cpu()
        for step, loss, norm in zip(steps, values[0].tolist(), values[1].tolist(), strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise UserError(
                    f"the loss of step {step} is {loss} and its gradient's norm {norm}: the run diverged; the last "
                    f"checkpoint is sound: start again in a new --out with a lower lr, a longer warmup or clip=1"
                )
            record = {"step": step, "loss": loss, "grad_norm": norm, "lr": self.rate(step - 1)}
            self.write(record)
        now = time.monotonic()
        speed = len(steps) * self.recipe.batch / max(1e-9, now - self.clock)
        self.clock = now
        self.show_speed(steps[-1], values[0, -1].item(), speed)

    def rate(self, step: int) -> float:
        r = self.recipe
        return learning_rate(step, base=r.lr, steps=self.steps, warmup=r.warmup, decay=r.decay)

    def show_speed(self, step: int, loss: float, speed: float) -> None:
        """Speed has records of its own: unlike all others, they differ from run to run."""
        words = {"loss": f"{loss:.4f}", "images/s": f"{speed:.0f}"}
        record: dict[str, Any] = {"speed": {"step": step, "images_per_second": round(speed, 1)}}
        top = peak_flops(self.cluster.device)
        if top is not None:
            self.flops = self.flops or cost(lambda: build(self.plan.config)).train_flops
            used = speed * self.flops / top / self.cluster.world
            words["MFU"] = f"{used:.0%}"
            record["speed"]["mfu"] = round(used, 4)
        self.write(record)
        self.bar.update(step, **words)

    def write(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            with checkpoint.disk_errors(self.plan.out / LOG):
                self.log.write(record)
        if self.board is not None and "step" in record:
            with checkpoint.disk_errors(self.plan.out / "tensorboard"):
                self.board.write(record)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Every test image exactly once, with the raw weights and with the averaged ones.

        A signal does not wait for it: the run is saved as it is, and the test is the first thing a continuation does.
        Many processes are in step with each other here, and go on to the end.
        """
        self.flush()  # the log is in the order of steps, wherever a run was cut
        record: dict[str, Any] = {"step": self.done}
        try:
            with self.signals.now() if self.cluster.world == 1 else nullcontext():
                record["test"] = self.measure()
                if self.average is not None:
                    with self.average.applied():
                        record["ema"] = self.measure()
        except Interrupted:
            self.tested = False
            self.save(wait=True)
            raise self.stopped(self.signals.number) from None
        self.tested = True
        self.write(record)
        self.report = record.get("ema", record["test"])
        self.bar.update(self.done, accuracy=f"{self.report['accuracy']:.2%}")
        score = self.goal.score(self.report)
        if self.best is None or score > self.best:
            self.best = score
            self.save_best()
        self.clock = time.monotonic()

    def measure(self) -> dict[str, float]:
        self.module.eval()
        most = -(-len(self.plan.data.test) // self.cluster.world)  # images of the process that has most
        module = self.module if self.sharded else self.core
        # eager: a test set comes in batches of two sizes, and each would be compiled anew
        with self.autocast(), torch.compiler.set_stance("force_eager"):
            return measure(
                self.goal,
                module,
                map(self.cast, self.tester.batches()),
                lambda: self.cast(blank(self.plan.config.image_size, self.cluster.device)),
                self.cluster,
                passes=-(-most // self.tester.batch),
            )

    def save(self, wait: bool) -> None:
        """checkpoints/last: all that is needed to go on. Sharded runs go on while it is written, unless they end."""
        self.flush()
        state = checkpoint.state_of(self.core, self.optimizer, self.average)
        with checkpoint.disk_errors(self.plan.out / LOG):
            length = self.log.flush() if self.log is not None else 0
        facts = CheckpointMeta(self.done, length, self.micro, self.best, self.cluster.world, self.tested)
        if self.saver is not None:
            self.saver.save(last(self.plan.out), state, facts)
            if wait:
                self.saver.wait()
        elif self.cluster.first:
            checkpoint.save(last(self.plan.out), state, facts)
        self.cluster.barrier()

    def save_best(self) -> None:
        """checkpoints/best: the model alone, as `vitlab.load` takes it."""
        weights = self.final_weights()
        if self.cluster.first:
            place = self.plan.out / "checkpoints" / "best"
            checkpoint.replace(place, lambda new: self.write_model(new, weights))
            shutil.rmtree(checkpoint.sibling(place, "old"), ignore_errors=True)
        self.cluster.barrier()

    def final_weights(self) -> dict[str, Tensor]:
        """The model's weights in one piece, averaged if the run averages."""
        averaged = self.average.applied() if self.average is not None else nullcontext()
        with averaged:
            model = self.core.vit if isinstance(self.core, MaskedPatches) else self.core
            return {name: gather_full(tensor).detach().cpu().clone() for name, tensor in model.state_dict().items()}

    def write_model(self, folder: Path, weights: dict[str, Tensor]) -> None:
        model = build(self.plan.config)
        model.load_state_dict(weights)
        labels = None if self.recipe.objective == "masked" else self.plan.data.classes
        try:
            save(model, folder, preprocess=self.plan.preprocess, labels=labels)
        except UserError as error:
            raise OSError(str(error)) from error  # told together with what becomes of the run

    def finish(self) -> None:
        """DIR/model.safetensors and DIR/config.json are the model."""
        weights = self.final_weights()
        if self.cluster.first:
            with checkpoint.disk_errors(self.plan.out):
                self.write_model(self.plan.out, weights)
        if not self.report:  # taken up after its last step
            self.report = last_report(self.plan.out / LOG)
        self.cluster.barrier()

    def close(self) -> None:
        with checkpoint.disk_errors(self.plan.out):
            for record in (self.log, self.board):
                if record is not None:
                    record.close()


def draw_seed(*parts: int) -> int:
    """A seed for the model's own draws, from what they belong to."""
    return int(keys(*parts)[0] >> np.uint64(1))
