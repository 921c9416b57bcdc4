"""A traceable model whose attention is one operation of ONNX Runtime's own, which is faster there than its parts.

Shapes: B batch, N tokens, D width, H heads, K head width; n rows of queries, N or 1.
"""

import torch
from torch import Tensor, nn

from vitlab.inference.graph_check import ATTENTION, OWN
from vitlab.inference.traced import TokenAttention
from vitlab.models.rotary import Turn
from vitlab.models.variants import Model
from vitlab.models.vit import Attention

OPERATION = f"{OWN}::{ATTENTION}"


class FusedAttention(Attention):
    """Can be exported, not called."""

    rows: int | None = None  # of queries, from the first; None: all

    def forward(self, x: Tensor, rotary: Turn | None = None) -> Tensor:
        q, k, v, bias = self.flat(x, rotary)
        q, bias = q[:, : self.rows], None if bias is None else bias[:, :, : self.rows]
        inputs = (q, k, v) if bias is None else (q, k, v, None, None, bias)
        y = torch.onnx.ops.symbolic(
            OPERATION, inputs, {"num_heads": self.heads}, dtype=q.dtype, shape=q.shape, version=1
        )
        return self.dropout(self.out(self.norm(y.reshape(*x.shape[:-2], -1, x.shape[-1]))))

    def flat(self, x: Tensor, rotary: Turn | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values, (B, N, D), and the position logits, (B, H, N, N)."""
        if x.ndim == 3 and rotary is None and self.relative is None and isinstance(self.q_norm, nn.Identity):
            qkv = self.qkv(x) if self.qv_bias is None else self.qkv(x) + self.padded_bias()
            q, k, v = qkv.chunk(3, -1)  # no heads have to be put apart
            return q, k, v, None
        q, k, v, bias = self.project(x, rotary)
        q, k, v = (part.transpose(1, 2).flatten(2) for part in (q, k, v))
        return q, k, v, bias


class FusedTokenAttention(FusedAttention):
    rows = 1


FUSED: dict[type[nn.Module], type[nn.Module]] = {Attention: FusedAttention, TokenAttention: FusedTokenAttention}


def fuse(model: Model) -> Model:
    """Change a traceable model, in place."""
    for module in model.modules():
        module.__class__ = FUSED.get(type(module), type(module))
    return model
