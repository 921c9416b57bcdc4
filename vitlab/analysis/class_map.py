"""Where the evidence for a class is: a map of an image and a class, of any model with a head.

Shapes: B batch, N tokens, D width, h and w patches down and across.
"""

import copy

import torch
from torch import Tensor, nn

from vitlab.analysis.held import encode_until, held_logits
from vitlab.errors import UserError
from vitlab.models.images import check_images
from vitlab.models.resnet import ResNet
from vitlab.models.variants import Model
from vitlab.models.vit import ViT

DEPTH = 1 / 3  # of the blocks: before it tokens know little of the object, after it they are mixed


def class_map(model: Model, images: Tensor, label: int | Tensor) -> Tensor:
    """How much each patch adds to the evidence for a class.

    A patch has what its token, a third of the way through the blocks, adds to the logit of the class, compared with the
    token of an even gray image in its place; in a ResNet, its cell of the final map. Evidence against the class is left
    out. Nothing of the model changes, and several threads may call this with one model.

    Args:
        model: a vitlab ViT (plain, hybrid, axial, of any pooling) or ResNet with a head.
        images: normalized RGB images of the model's size, (B, 3, height, width).
        label: the class from 0, one for all images or (B,), one for each; of a multi-label model too.

    Returns:
        Maps (B, h, w) of numbers from 0 on, without gradients; h and w are `model.config.grid`. Without evidence
        for the class, the map is zero everywhere.

    Raises:
        UserError: for a model without a head or of another kind, a class that it does not have, or other images.

    >>> import torch, vitlab
    >>> model = vitlab.create("Ti/16", image_size=(32, 48), depth=2)
    >>> class_map(model, torch.zeros(1, 3, 32, 48), 7).shape
    torch.Size([1, 2, 3])
    """
    with torch.inference_mode(False), torch.enable_grad():
        ready = as_readable(model)
        weight = ready.root.weight if isinstance(ready, ResNet) else ready.embed.weight
        with torch.autocast(weight.device.type, enabled=False):
            check_images(images, ready.config.image_size, weight)
            images = images.detach().clone() if images.is_inference() else images.detach()
            labels = check_labels(label, len(images), ready.config.classes).to(weight.device)
            if isinstance(ready, ResNet):
                parts = cell_parts(ready, images, labels)
            else:
                parts = patch_parts(ready, images, labels)
            return parts.clamp(min=0).unflatten(-1, ready.config.grid)


def as_readable(model: nn.Module) -> Model:
    """The model in eval mode, with weights that gradients can pass; a copy where it is not, as it stays as it is."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, ViT | ResNet):
        raise UserError(f"class_map() takes a vitlab model, not {type(inner).__name__}")
    if inner.head is None:
        raise UserError("this model has no head, so it has no classes to map; load it with its head or fine-tune it")
    frozen = any(tensor.is_inference() for tensor in (*inner.parameters(), *inner.buffers()))
    busy = any(module.training for module in inner.modules())  # its dropout would change the map
    return copy.deepcopy(inner).eval() if frozen or busy else inner


def check_labels(label: int | Tensor, count: int, classes: int) -> Tensor:
    """Labels (B,) of the images."""
    labels = torch.as_tensor(label)
    if labels.is_floating_point() or labels.ndim > 1 or (labels.ndim == 1 and len(labels) != count):
        what = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise UserError(f"label must be the number of a class, or {count} of them, one for each image, not {what}")
    for wrong in labels[(labels < 0) | (labels >= classes)].flatten().tolist()[:1]:
        raise UserError(f"there is no class {wrong}; this model has {classes}, from 0 to {classes - 1}")
    return labels.long().expand(count).clone()  # a tensor made in inference mode cannot enter the graph


def patch_parts(model: ViT, images: Tensor, labels: Tensor) -> Tensor:
    """The part of each patch, (B, hw)."""
    start = round(DEPTH * len(model.blocks))
    with torch.no_grad():
        tokens = encode_until(model, model.patches(with_gray(images)), start)  # (B + 1, N, D)
    x, base = tokens[:-1].requires_grad_(), tokens[-1]
    return contributions(x, base, held_logits(model, x, start), labels)[:, model.config.prefix :]


def cell_parts(model: ResNet, images: Tensor, labels: Tensor) -> Tensor:
    """The part of each cell, (B, hw)."""
    assert model.head is not None  # checked at the start
    with torch.no_grad():
        cells = model.tokens(with_gray(images))  # (B + 1, hw, C)
    x, base = cells[:-1].requires_grad_(), cells[-1]
    return contributions(x, base, model.head(x.mean(1)), labels)


def with_gray(images: Tensor) -> Tensor:
    """The images and an even one of the mean color, which is zero after normalization."""
    return torch.cat([images, torch.zeros_like(images[:1])])


def contributions(x: Tensor, base: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """What tokens x (B, N, D) instead of base (N, D) add to the labels' logits: difference times gradient, (B, N)."""
    (gradient,) = torch.autograd.grad(logits.gather(1, labels[:, None]).sum(), x)
    return ((x.detach() - base) * gradient).sum(-1)
