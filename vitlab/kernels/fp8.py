"""Dense layers whose products run in 8 bits, twice as fast as in 16 on GPUs that have them.

Values and weights are float8 e4m3 (a sign, 4 bits of exponent, 3 of fraction), gradients e5m2, whose range is wider.
Each tensor has one scale, from the largest magnitudes of the steps before ("delayed scaling"): to look first and then
round would cost more than it gains. What is beyond the scale saturates, and the scale doubles in the next step. The
forward product and the gradient of the input are in 8 bits; the gradient of the weight is bfloat16's.

The largest magnitudes seen in a pass come out of it as the "gradient" of `maxima`, so that neither pass changes
anything in place, and torch.compile and CUDA graphs take them as they are.

Shapes: M rows, I inputs, O outputs.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.models.vit import MLP

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MARGIN = 2.0  # room above the largest magnitude seen so far
FORGET = 0.9  # what is left of an old maximum after a step
SAMPLED = 16  # one row of so many is looked at for the largest magnitude
START = (16.0, 1.0)  # maxima of values and gradients before the first step
SMALLEST = 1e-12
FIRST = (8, 9)  # compute capability of the first GPUs with these products


class Float8Linear(nn.Linear):
    """A dense layer with the parameters of another one, and the running maxima of its input, gradient and weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        largest = layer.weight.detach().abs().max().float()
        self.native = has_float8(largest.device)
        self.maxima = nn.Parameter(torch.stack([*(largest.new_tensor(x) for x in START), largest]))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(self.weight.dtype).flatten(0, -2)
        y: Tensor = Product.apply(rows, self.weight, self.bias, self.maxima, self.native)
        return y.unflatten(0, x.shape[:-1])


class Product(torch.autograd.Function):
    """x W^T + b, (M, O), of x (M, I), W (O, I) and b (O,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, maxima: Tensor, native: bool) -> Tensor:
        value_scale, weight_scale = scale_of(maxima[0], E4M3), scale_of(maxima[2], E4M3)
        values, weights = quantize(x, value_scale, E4M3), quantize(weight, weight_scale, E4M3)
        ctx.save_for_backward(
            x, weight, maxima, largest(values[::SAMPLED]) * value_scale, largest(weights) * weight_scale
        )
        ctx.native = native
        return multiply(values, weights.t(), value_scale, weight_scale, bias, native)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy = gradients[0].contiguous()
        x, weight, maxima, seen_value, seen_weight = ctx.saved_tensors
        dy_scale, weight_scale = scale_of(maxima[1], E5M2), scale_of(maxima[2], E4M3)
        rounded = quantize(dy, dy_scale, E5M2)
        turned = quantize(weight, weight_scale, E4M3).t().contiguous()  # (I, O): the product wants columns together
        dx = multiply(rounded, turned.t(), dy_scale, weight_scale, None, ctx.native)
        dw = dy.t() @ x if ctx.needs_input_grad[1] else None
        db = dy.sum(0) if ctx.needs_input_grad[2] else None
        seen = torch.stack([seen_value, largest(rounded[::SAMPLED]) * dy_scale, seen_weight])
        return dx, dw, db, seen, None


def scale_of(maximum: Tensor, kind: torch.dtype) -> Tensor:
    """What a stored number is multiplied by to be the number it stands for, ()."""
    return maximum * (MARGIN / LARGEST[kind])


def quantize(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    return (x.float() / scale).clamp(-LARGEST[kind], LARGEST[kind]).to(kind)


def largest(x: Tensor) -> Tensor:
    return x.float().abs().amax()


def multiply(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    native: bool,
    out: torch.dtype = torch.bfloat16,
    *,
    fast: bool = True,
) -> Tensor:
    """(a a_scale) (b b_scale) + bias in 16 bits, with b (I, O) stored by columns; emulated if not native.

    The fast sums are of about 14 bits, which is enough for hundreds of terms and not for tens of thousands.
    """
    if native:
        kinds: dict[str, Any] = {"out_dtype": out, "use_fast_accum": fast}
        return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, bias=bias, **kinds)
    y = (a.float() * a_scale) @ (b.float() * b_scale)
    return (y if bias is None else y + bias).to(out)


def has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST


def use_float8(module: nn.Module) -> dict[str, Float8Linear]:
    """Replace the dense layers of a model's MLPs that learn and whose sides 16 divides, in place; these by name.

    Frozen ones stay as they are: to see its maxima, the backward pass would have to go through a frozen body.
    """
    found: dict[str, Float8Linear] = {}
    for name, part in list(module.named_modules()):
        for child in ("up", "down") if isinstance(part, MLP) else ():
            layer = getattr(part, child)
            if type(layer) is nn.Linear and layer.weight.requires_grad and has_even_sides(layer):
                found[f"{name}.{child}"] = Float8Linear(layer)
                setattr(part, child, found[f"{name}.{child}"])
    return found


def has_even_sides(layer: nn.Linear) -> bool:
    return layer.in_features % 16 == 0 and layer.out_features % 16 == 0


class Maxima:
    """The running maxima of layers, and the largest magnitudes seen in the passes of a step so far."""

    def __init__(self, layers: Iterable[Float8Linear]) -> None:
        self.running: list[Tensor] = [layer.maxima for layer in layers]
        self.seen: dict[int, Tensor] = {}  # by the places in `running` of layers that were used

    @torch.no_grad()
    def note(self) -> None:
        """After a pass: take what it has seen, before gradients of the next one are added to it."""
        for place, maxima in enumerate(self.running):
            if maxima.grad is not None:
                before = self.seen.get(place)
                self.seen[place] = maxima.grad if before is None else torch.maximum(before, maxima.grad)
                maxima.grad = None

    @torch.no_grad()
    def update(self) -> None:
        """After a step: let the scales of the next one follow what was seen."""
        running, seen = [self.running[place] for place in self.seen], list(self.seen.values())
        if running:
            torch._foreach_mul_(running, FORGET)
            torch._foreach_maximum_(running, seen)
            torch._foreach_clamp_min_(running, SMALLEST)
        self.seen = {}
