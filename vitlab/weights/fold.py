"""Another normalization of pixels, folded into the patch projection.

With pixels p, a model normalizes by (p - m) / s and projects. From values normalized by (p - n) / t the same input is
(t / s) x + (n - m) / s, so kernels are scaled by t / s for each channel, and the bias gets the constant. That is exact
as long as nothing is padded: a zero of padding would have to become another number.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, Preprocess, ResNetConfig


def fold_normalization(
    config: ModelConfig, tensors: Mapping[str, Tensor], old: Preprocess, new: Preprocess
) -> tuple[dict[str, Tensor], Preprocess]:
    """The tensors that give the same logits for pixels with the new mean and std, and the preprocessing with these."""
    if isinstance(config, ResNetConfig) or config.stem is not None:
        raise UserError("only the normalization of plain patches can be folded: a ResNet pads what it normalized")
    if not config.embed_bias:
        raise UserError("this model's patch projection has no bias, into which the normalization would be folded")
    made = dataclasses.replace(old, mean=new.mean, std=new.std)
    if made == old:
        return dict(tensors), old
    m, s, n, t = (torch.tensor(x, dtype=torch.float64) for x in (old.mean, old.std, new.mean, new.std))
    kernel, bias = tensors["embed.weight"].double(), tensors["embed.bias"].double()
    shift = (kernel.sum((2, 3)) * ((n - m) / s)).sum(1)
    folded = {"embed.weight": kernel * (t / s)[:, None, None], "embed.bias": bias + shift}
    return {**tensors, **{name: x.to(tensors[name].dtype) for name, x in folded.items()}}, made
