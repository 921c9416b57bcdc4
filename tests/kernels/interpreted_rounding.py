"""Run by test_fp8_mlp.py with TRITON_INTERPRET=1: what the kernel computes beside torch's in float64, as JSON.

It writes float32 here: the interpreter's 8 bits are wrong where rounding carries into the exponent.
"""

import json
from unittest.mock import patch

import torch
from torch.nn.functional import gelu

from vitlab.kernels import fp8_rounding

if __name__ == "__main__":
    torch.manual_seed(0)
    x, u = (3 * torch.randn(144, 80)).bfloat16(), (3 * torch.randn(144, 80)).bfloat16()
    scale = torch.tensor(0.02)
    at = u.double().requires_grad_()
    slope = torch.autograd.grad(gelu(at), at, x.double())[0]
    found: dict[str, dict[str, float]] = {}
    limits = {torch.float32: 448.0}
    numbers = torch.randint(-128, 128, (144, 80), dtype=torch.int8)
    found["bytes"] = {"turned": bool((fp8_rounding.triton_turn(numbers) == numbers.t()).all())}
    with (
        patch.object(fp8_rounding, "kind_of", lambda gradient: torch.float32),
        patch.object(fp8_rounding, "LARGEST", limits),
        patch.object(fp8_rounding, "triton_turn", lambda x: x.t()),  # of bytes alone
    ):
        for what, value in (("plain", x.double()), ("gelu", gelu(x.double())), ("slope", slope)):
            rounded, _, sums, most = fp8_rounding.triton_round(x, u, scale, what, True)
            wanted = (value / 0.02).clamp(-448, 448)
            found[what] = {
                "apart": float((rounded - wanted).abs().max()),
                "clamped": int((rounded.abs() == 448).sum() - (wanted.abs() == 448).sum()),
                "sums": float((sums - value.sum(0)).abs().max()),
                "most": float((most - value.abs().max()).abs()),
            }
    print(json.dumps(found))
