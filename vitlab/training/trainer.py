"""The training step: micro-batches, gradients, the optimizer and averaged weights; and evaluation between steps.

Everything random is a function of (seed, step), so that a resumed run equals the run that was never interrupted: the
loader's batches, the model's dropout (its generator is seeded before every micro-batch) and the masks. The size of
images is the loader's too: the model takes what it is given.
"""

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from vitlab.data.balance import class_weights
from vitlab.data.loader import Batch, describe_broken
from vitlab.data.rng import keys
from vitlab.device import has_bf16, out_of_memory
from vitlab.errors import UserError
from vitlab.evaluation.multi_label import EVEN
from vitlab.kernels.class_token import use_class_token
from vitlab.kernels.compiling import compile_in_place
from vitlab.kernels.fp8 import has_float8
from vitlab.kernels.install import use_kernels
from vitlab.models.config import Size, ViTConfig
from vitlab.models.resnet import fixed_kernels
from vitlab.models.shown import show
from vitlab.models.variants import Model, build
from vitlab.models.vit import ViT
from vitlab.terminal import warn
from vitlab.training import checkpoint
from vitlab.training.checkpoint import CheckpointMeta
from vitlab.training.cuda_graph import GraphedStep, StepResult
from vitlab.training.lora import add_updates, own_state
from vitlab.training.masked import MaskedPatches, PatchPrediction
from vitlab.training.objectives import LOSSES, Classification, MultiLabel, Objective, blank_batch, measure_sums
from vitlab.training.optim import Average, clip_gradients, learning_rate, make_optimizer, set_learning_rate
from vitlab.training.parallel import Cluster, gather_full, gradient_sync, wrap_module
from vitlab.training.patch_targets import make_target
from vitlab.training.recipe import plain_from, small_until
from vitlab.training.setup import RunSetup, choose_micro, divisors, make_loaders
from vitlab.training.teacher import Distillation, Mapped, Teacher, feature_width, make_lesson
from vitlab.training.working_copy import WorkingCopy


class Trainer:
    """What one process trains: the model, its objective, the optimizer, the averaged weights and the data.

    `core` is the module with plain parameter names that the optimizer changes; `module` is what a step calls: the
    same module, a wrapper around it that shares gradients with other processes, or its `working` copy in bfloat16.
    `restored` describes the checkpoint it starts from.
    """

    def __init__(self, setup: RunSetup, cluster: Cluster) -> None:
        r = setup.recipe
        self.setup, self.recipe, self.cluster = setup, r, cluster
        self.steps = r.steps or 0
        self.bf16 = r.precision in ("bfloat16", "fp8") or (r.precision == "auto" and has_bf16(cluster.device))
        self.dtype = torch.float64 if r.precision == "float64" else torch.float32
        compiled = r.compile == "yes" or (r.compile == "auto" and cluster.device.type == "cuda")
        self.core, self.objective = self.make_core()
        self.size = setup.config.image_size  # of the images it trains on
        self.compiled = compiled
        self.lesson = self.make_lesson()
        self.working = self.make_working_copy()
        inner = self.core if self.working is None else self.working.module
        use_kernels(inner, compiled=compiled)
        if r.objective != "masked":  # which predicts from all tokens
            use_class_token(inner)
        self.module = wrap_module(inner, cluster, recompute=r.recompute, compiled=compiled, parallel=r.parallel)
        betas, capturable = (r.beta1, r.beta2), r.cuda_graph and self.is_one_gpu
        self.optimizer = make_optimizer(
            self.core,
            r.optimizer,
            weight_decay=r.weight_decay,
            betas=betas,
            momentum=r.momentum,
            capturable=capturable,
            dtype=torch.bfloat16 if self.bf16 and cluster.device.type == "cuda" else self.dtype,
        )
        self.graphed: GraphedStep | None = None
        self.average = Average(self.core, r.ema) if r.ema else None
        self.is_updating = False  # true while the optimizer changes weights
        self.restored = self.restore()
        self.micro = self.restored.micro
        self.loader, self.eval_loaders = make_loaders(setup, cluster, self.micro)
        self.broken: dict[str, list[str]] = {}  # images of a split that could not be read when it was evaluated
        self.batches = self.batches_from(self.restored.step)

    def close(self) -> None:
        """End the loader's workers now: garbage collection, which finalizes their queues first, would wait for them."""
        self.batches = iter(())

    # ---- start

    def make_core(self) -> tuple[nn.Module, Objective]:
        """The module that learns, on its device, and its objective."""
        r, config = self.recipe, self.setup.config
        model = self.setup.initial if self.setup.initial is not None else build(config)
        device, dtype = self.cluster.device, self.dtype
        if r.objective == "masked":  # never with a frozen body
            if not isinstance(model, ViT) or not isinstance(config, ViTConfig):
                raise UserError(f"masked patch prediction needs a transformer, and {r.model} is a ResNet")
            target = make_target(r.masked_target, self.setup.preprocess, config)
            objective = PatchPrediction(target, r.seed, config.grid, r.masking, r.corruption)
            return self.with_map(MaskedPatches(model, target.outputs)).to(device, dtype), objective
        if r.freeze == "body":
            for name, p in model.named_parameters():
                p.requires_grad_(name.startswith("head."))
        if r.lora:
            add_updates(model, r.lora, r.lora_alpha, r.seed)
        data, weights = self.setup.data, None
        if r.balance == "weights":
            weights = torch.from_numpy(class_weights(data.train.class_counts())).to(device, torch.float32)
        supervised = MultiLabel() if data.is_multi_label else Classification(LOSSES[r.objective], weights)
        return self.with_map(model).to(device, dtype), supervised

    def with_map(self, student: Model | MaskedPatches) -> nn.Module:
        """The student, with a map to its teacher's features where it learns these."""
        teacher = self.setup.teacher
        if teacher is None or not self.recipe.teacher_features:
            return student
        return Mapped(student, feature_width(teacher))

    def make_working_copy(self) -> WorkingCopy | None:
        """What computes in mixed precision; raises UserError where products in 8 bits are not possible."""
        float8, device = self.recipe.precision == "fp8", self.cluster.device
        if float8 and not self.uses_working_copy:
            raise UserError("precision=fp8 is for a transformer in one process; use precision=bfloat16")
        if float8 and device.type == "cuda" and not has_float8(device):
            raise UserError("precision=fp8, and this GPU has no products in 8 bits; use precision=bfloat16")
        working = WorkingCopy(self.core, float8=float8) if self.uses_working_copy else None
        if float8 and working is not None and not working.float8:
            need = "an MLP that learns, with widths that 16 divides"
            raise UserError(f"precision=fp8 needs {need}, and this run has none; use precision=bfloat16")
        return working

    def make_lesson(self) -> Distillation | None:
        """What the run learns from its teacher, which is complete on every device; None without one."""
        model = self.setup.teacher
        if model is None:
            return None
        teacher = Teacher(model, self.setup.preprocess, self.size)
        teacher.to(self.cluster.device, self.dtype)
        if self.compiled:
            compile_in_place(teacher)
        return make_lesson(self.recipe, self.objective, model, teacher)

    def restore(self) -> CheckpointMeta:
        """Load the checkpoint to resume from, if there is one, and return its metadata.

        The micro-batch is chosen anew for a new run, and for another number of processes than the checkpoint's.
        """
        found, world = self.setup.checkpoint, self.cluster.world
        if found is None or found.meta.world != world:
            micro = choose_micro(self.setup, self.cluster, self.core, bf16=self.bf16)
        if found is None:
            return CheckpointMeta(step=0, log_bytes=0, micro=micro, best=None)
        if self.cluster.first:
            for reason in found.damaged:
                warn(f"skipped the checkpoint {reason}")
        from vitlab.training.sharded import read_state  # takes a while

        trained = self.core, self.optimizer, self.average, self.scales()
        checkpoint.restore_state(read_state(found.folder, checkpoint.expected_state(*trained)), *trained)
        self.refresh()
        self.cluster.barrier()
        if self.cluster.first:
            checkpoint.remove_leftovers(checkpoint.last_checkpoint(self.setup.out), found.folder)
        return found.meta if found.meta.world == world else dataclasses.replace(found.meta, micro=micro)

    def rewind(self, state: dict[str, Tensor], setup: RunSetup) -> None:
        """Go back to `state`, that of before the first step, with the optimizer's empty; from then on train `setup`."""
        checkpoint.restore_state(state, self.core, self.optimizer, self.average, self.scales())
        self.refresh()
        if self.graphed is None:
            self.optimizer.state.clear()
        else:  # a recorded step refers to these very tensors; zeros are what they start as
            for name, tensor in self.state().items():
                if name.startswith("optimizer/"):
                    tensor.zero_()
        self.setup, self.recipe, self.steps = setup, setup.recipe, setup.recipe.steps or 0
        self.batches = self.batches_from(0)

    # ---- the training step

    def step(self, step: int) -> StepResult:
        """Train on one batch; its mean loss and the norm of its gradient, as tensors on the device."""
        set_learning_rate(self.optimizer, self.learning_rate(step))
        while (result := self.try_step(step)) is None:
            self.shrink_micro(step)
        if self.average is not None:
            self.average.update(step)
        return result

    def try_step(self, step: int) -> StepResult | None:
        """Change the weights once, or return None where memory ran out before that.

        The error must be gone before the next attempt: its traceback holds the frames that hold the activations.
        """
        try:
            if self.uses_cuda_graph:
                return self.replay(step)
            return self.accumulate(step), self.optimizer_step()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return None

    def accumulate(self, step: int) -> Tensor:
        """Add up the gradients of a batch over its micro-batches; return this process's mean loss."""
        total = torch.zeros((), device=self.cluster.device, dtype=self.dtype)
        for part in range(self.parts):
            batch = self.next_batch(step, part)
            with gradient_sync(self.module, last=part == self.parts - 1):
                total += self.backward(batch, step)
        return total

    def next_batch(self, step: int, part: int) -> Batch:
        """The next micro-batch, number `part` of a step, with the model's random generator seeded for it."""
        if not self.module.training:
            self.module.train()
        batch = next(self.batches)
        self.train_at((batch.images.shape[2], batch.images.shape[3]))
        torch.manual_seed(dropout_seed(self.recipe.seed, step, part, self.cluster.rank))
        return batch

    def train_at(self, size: Size) -> None:
        """Take training images of a size from now on; a recorded step is for one size alone."""
        if size != self.size:
            if self.graphed is not None:
                torch.cuda.synchronize()  # it may be running
            self.size, self.graphed = size, None
            self.lesson = self.make_lesson()
        show(self.model if self.working is None else unwrap(self.working.module), size)

    def backward(self, batch: Batch, step: int) -> Tensor:
        """Add a micro-batch's share to the gradients; return its share of the loss."""
        with self.autocast():
            loss = (self.lesson or self.objective).loss(self.module, batch, step) / self.parts
        loss.backward()
        if self.working is not None:
            self.working.move_gradients()
        return loss.detach()

    def optimizer_step(self) -> Tensor:
        """Clip the gradients, change the weights, and return the gradients' norm before clipping."""
        norm = clip_gradients(self.core.parameters(), self.recipe.clip)
        self.is_updating = True
        self.optimizer.step()
        if self.working is not None:
            self.working.follow()
        self.is_updating = False
        self.optimizer.zero_grad()
        return norm

    def refresh(self) -> None:
        """Let what a step calls have the weights of `core`."""
        if self.working is not None:
            self.working.refresh()

    @property
    def uses_working_copy(self) -> bool:
        """In one process: several exchange gradients in float32, which a copy in bfloat16 does not have."""
        return self.bf16 and self.cluster.world == 1 and isinstance(self.model, ViT)

    def learning_rate(self, step: int) -> float:
        r = self.recipe
        return learning_rate(step, base=r.lr, steps=self.steps, warmup=r.warmup, decay=r.decay, end=r.lr_end)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.cluster.device.type, torch.bfloat16, enabled=self.bf16)

    # ---- the step as a CUDA graph

    @property
    def is_one_gpu(self) -> bool:
        return self.cluster.device.type == "cuda" and self.cluster.world == 1

    @property
    def uses_cuda_graph(self) -> bool:
        r = self.recipe
        if not (r.cuda_graph and self.is_one_gpu and self.parts == 1):
            return False
        # masks are drawn on the host, and recomputation keeps the random generator's state there
        return r.objective != "masked" and not r.recompute

    def replay(self, step: int) -> StepResult:
        """A step as one CUDA graph, once it is recorded."""
        batch = self.next_batch(step, 0)
        if self.graphed is None:
            self.graphed = GraphedStep(lambda batch: (self.backward(batch, step), self.optimizer_step()))
        return self.graphed(batch)

    # ---- micro-batches

    @property
    def parts(self) -> int:
        """Micro-batches of this process in a step."""
        return self.recipe.batch // (self.micro * self.cluster.world)

    def batches_from(self, step: int) -> Iterator[Batch]:
        """This process's micro-batches from a step on, without end."""
        self.loader.batch, self.loader.plain_from = self.micro * self.cluster.world, plain_from(self.recipe)
        self.loader.small_size, self.loader.small_until = self.recipe.small_size, small_until(self.recipe)
        return map(self.cast, self.loader.batches(step * self.parts))

    def cast(self, batch: Batch) -> Batch:
        return batch if self.dtype == torch.float32 else dataclasses.replace(batch, images=batch.images.to(self.dtype))

    def shrink_micro(self, step: int) -> None:
        """Prepare to repeat a step that ran out of memory with a smaller micro-batch; raise where there is none."""
        smaller = [d for d in divisors(self.micro) if d < self.micro]
        if not smaller or self.cluster.world > 1 or self.is_updating:  # partly changed weights cannot repeat the step
            raise UserError(
                f"out of memory with micro-batches of {self.micro} images; set micro={smaller[0] if smaller else 1}, "
                "recompute=true, or a smaller image_size or model"
            )
        warn(f"out of memory with micro-batches of {self.micro} images; continuing with {smaller[0]}")
        self.micro = smaller[0]
        self.graphed = None
        self.optimizer.zero_grad()
        if self.working is not None:
            self.working.forget()
        self.batches = self.batches_from(step)
        for loader in self.eval_loaders.values():
            loader.shrink(2 * self.micro)
        gc.collect()
        torch.cuda.empty_cache()

    # ---- between steps

    def evaluate(self, split: str) -> dict[str, dict[str, float]]:
        """Reports on a split: the current weights' under its name, the averaged ones' under "ema".

        Where images of it cannot be read, their number is under "broken".
        """
        reports = {split: self.objective.report(self.measure(split))}
        if self.average is not None:
            with self.average.swap_in():
                reports["ema"] = self.objective.report(self.measure(split))
        return reports | ({"broken": {split: len(self.broken[split])}} if self.broken[split] else {})

    def put_back(self) -> None:
        """Give the model its own weights back, after an evaluation that was interrupted anywhere."""
        if self.average is not None:
            self.average.put_back()

    def thresholds(self) -> tuple[float, ...] | None:
        """The thresholds of a multi-label model, chosen on validation images; None for any other model."""
        if not isinstance(self.objective, MultiLabel):
            return None
        if "validation" not in self.eval_loaders:
            return (EVEN,) * len(self.setup.data.classes)
        with self.average.swap_in() if self.average is not None else nullcontext():
            return self.objective.thresholds(self.measure("validation"))

    @torch.no_grad()
    def measure(self, split: str) -> list[float]:
        """The objective's sums on a split, every image that can be read counted once over all processes."""
        self.module.eval()
        self.core.eval()
        show(self.model, self.setup.config.image_size)
        loader = self.eval_loaders[split]
        most = -(-len(loader.source) // self.cluster.world)  # images of the process that has most
        passes = -(-most // loader.batch)
        module = self.module if self.is_sharded else self.core
        batches = map(self.cast, loader.batches())
        classes = self.setup.config.classes if isinstance(self.objective, MultiLabel) else 0
        spare = self.cast(blank_batch(self.setup.config.image_size, self.cluster.device, classes))
        # eager: a test set has batches of two sizes, and each would be compiled anew
        fixed = nullcontext() if self.is_sharded else fixed_kernels(module)  # of shards there are none
        with fixed, self.autocast(), torch.compiler.set_stance("force_eager"):
            sums = measure_sums(self.objective, module, batches, spare, self.cluster, passes)
        self.check_broken(split)
        return sums

    def check_broken(self, split: str) -> None:
        """Warn of images of a split that cannot be read: training is not lost for them.

        Raises UserError where no image can be read, or broken_limit is 0 and one cannot.
        """
        loader, before = self.eval_loaders[split], self.broken.get(split, [])
        self.broken[split] = broken = self.cluster.join(list(loader.broken.values()))
        images, limit = len(loader.source), self.recipe.broken_limit
        line = describe_broken(broken, images, split) if broken else ""
        if broken and (len(broken) == images or limit == 0):
            raise UserError(f"{line}; fix them, and continue with --resume")
        if len(broken) > len(before) and self.cluster.first:
            many = f", more than broken_limit ({limit:g}), so they may not be typical of it"
            warn(f"{line}; the scores are of the others{many if len(broken) > limit * images else ''}")

    @property
    def is_sharded(self) -> bool:
        return self.module is self.core and self.cluster.world > 1

    @property
    def model(self) -> Model:
        """The run's product, inside of what learns."""
        return unwrap(self.core)

    def state(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint holds, by name; nothing is copied."""
        return checkpoint.collect_state(self.core, self.optimizer, self.average, self.scales())

    def scales(self) -> dict[str, Tensor]:
        return {} if self.working is None else self.working.scales()

    def final_weights(self) -> dict[str, Tensor]:
        """The model's weights, or its low-rank updates, on the CPU, unsharded, and averaged if the run averages."""
        with self.average.swap_in() if self.average is not None else nullcontext():
            state = own_state(self.model).items()
            return {name: gather_full(tensor).detach().cpu().clone() for name, tensor in state}


def unwrap(core: nn.Module) -> Model:
    """The model inside of a module that learns."""
    inside = core.student if isinstance(core, Mapped) else core
    return cast(Model, inside.vit if isinstance(inside, MaskedPatches) else inside)


def dropout_seed(*parts: int) -> int:
    """A seed for the model's own draws from (seed, step, micro-batch, rank)."""
    return int(keys(*parts)[0] >> np.uint64(1))
