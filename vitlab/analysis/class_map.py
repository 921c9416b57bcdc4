"""Which patches speak for a class: a map of one image and one class, of any model with a head.

The score is the log-odds of the class. Each patch is credited with what is read from it, times the score's gradient.

Shapes: B batch, N tokens, D width, H heads, K head width, h and w patches down and across.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.images import check_images
from vitlab.models.resnet import ResNet
from vitlab.models.variants import Model
from vitlab.models.vit import Attention, Block, ViT, attention_weights


def class_map(model: Model, images: Tensor, label: int | Tensor) -> Tensor:
    """Which patches speak for a class.

    Where a class token reads the image, a patch's relevance is the sum over layers and heads of attention times
    gradient: by how much what the class token took from the patch raised the class's log-odds, to first order. Other
    models pool their final tokens, and each token has the share of its own. What speaks against the class is left out.

    Nothing of the model changes, and several threads may call this with one model.

    Args:
        model: a vitlab ViT (plain, hybrid, axial, of any pooling) or ResNet with a head.
        images: normalized RGB images of the model's size, (B, 3, height, width).
        label: the class from 0, one for all images or (B,), one for each; of a multi-label model too.

    Returns:
        Maps (B, h, w) of numbers from 0 on, without gradients; h and w are `model.config.grid`. Where nothing speaks
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
            images = images.detach().clone() if images.is_inference() else images.detach()
            check_images(images, ready.config.image_size, weight)
            labels = check_labels(label, len(images), ready.config.classes).to(weight.device)
            reads = isinstance(ready, ViT) and ready.config.token
            relevance = token_reads(ready, images, labels) if reads else pooled_tokens(ready, images, labels)
            return relevance.clamp(min=0).unflatten(-1, ready.config.grid)


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
        raise UserError(f"label must be one class or {count}, one for each image, not of shape {tuple(labels.shape)}")
    for wrong in labels[(labels < 0) | (labels >= classes)].flatten().tolist()[:1]:
        raise UserError(f"there is no class {wrong}; this model has {classes}, from 0 to {classes - 1}")
    return labels.long().expand(count).clone()  # a tensor made in inference mode cannot enter the graph


def log_odds(logits: Tensor, labels: Tensor, multi: bool) -> Tensor:
    """log p / (1 - p) of the labels (B,), from logits (B, classes).

    Unlike the logit, it says what distinguishes the class from the others; unlike log p, it has a gradient where p is
    almost 1. A multi-label model's logits are log-odds already.
    """
    own = logits.gather(1, labels[:, None])[:, 0]
    if multi or logits.shape[1] == 1:
        return own
    return own - logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)


def score(model: Model, tokens: Tensor, labels: Tensor) -> Tensor:
    """The sum over images of the log-odds, from the final tokens."""
    features = tokens.mean(1) if isinstance(model, ResNet) else model.pool_tokens(tokens)
    assert model.head is not None  # checked at the start
    logits = model.head(features)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return log_odds(logits, labels, model.card.thresholds is not None).sum()


# ---- models that pool their tokens


def pooled_tokens(model: Model, images: Tensor, labels: Tensor) -> Tensor:
    """Tokens times gradient, (B, N)."""
    with torch.no_grad():
        tokens = model.tokens(images)  # (B, N, D)
    tokens.requires_grad_()
    (gradient,) = torch.autograd.grad(score(model, tokens, labels), tokens)
    return (tokens.detach() * gradient).sum(-1)


# ---- models with a class token


@dataclass(frozen=True)
class Read:
    """What an attention layer computes: queries, keys, values and the mixed values y, (B, H, N, K)."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # (B, H, N, N)
    y: Tensor


def token_reads(model: ViT, images: Tensor, labels: Tensor) -> Tensor:
    """The class token's attention times its gradient, over all layers and heads, without that to itself: (B, N - 1)."""
    with torch.no_grad():
        x = model.patches(images)
    tokens, reads = encode(model, x.requires_grad_())
    gradients = torch.autograd.grad(score(model, tokens, labels), [read.y for read in reads])
    with torch.no_grad():
        parts = [credit(read, gradient) for read, gradient in zip(reads, gradients, strict=True)]
        return torch.stack(parts).sum(0)


def credit(read: Read, gradient: Tensor) -> Tensor:
    """What a layer's class token takes from each patch, times the gradient of y: (B, N - 1).

    y is linear in the attention weights, so their gradient is the values times y's.
    """
    first = slice(0, 1)
    weights = attention_weights(read.q[:, :, first], read.k, None if read.bias is None else read.bias[:, :, first])
    pull = (read.v * gradient[:, :, first]).sum(-1)  # (B, H, N)
    return (weights[:, :, 0] * pull).sum(1)[:, 1:]


def encode(model: ViT, x: Tensor) -> tuple[Tensor, list[Read]]:
    """`ViT.encode` with full attention, in eval mode, that keeps what each layer reads.

    Hooks would be simpler, but other threads would run into them.
    """
    assert model.token is not None
    x = torch.cat([model.token.to(x.dtype).expand(x.shape[0], -1, -1), x], 1)
    reads = []
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if model.positions is not None and (layer == 0 or model.config.placement != "stem"):
            x = x + model.positions(layer)
        read = attend(block.attention, block.norm1(x))
        x = x + block.attention.out(read.y.transpose(1, 2).reshape(x.shape))
        x = x + block.mlp(block.norm2(x))
        reads.append(read)
    return model.norm(x), reads


def attend(layer: Attention, x: Tensor) -> Read:
    q, k, v, bias = layer.project(x)
    return Read(q, k, v, bias, F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
