"""Run by test_bit_dropout.py with TRITON_INTERPRET=1: facts about the masks, as JSON."""

import json

import torch
from torch import nn

from vitlab.kernels.dropout import drop

if __name__ == "__main__":
    layer = nn.Dropout(0.1)
    x = torch.randn(20, 501, 8, requires_grad=True)
    torch.manual_seed(1)
    y = drop(layer, x)
    gradient = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    kept = y.detach() != 0
    other = drop(layer, x)
    torch.manual_seed(1)
    again = drop(layer, x)
    facts = {
        "rate": 1 - float(kept.double().mean()),
        "rates": (1 - kept.double().flatten(0, 1).mean(0)).tolist(),  # of each bit of a byte
        "correlation": float(torch.corrcoef(kept.reshape(-1, 8).T.double()).fill_diagonal_(0).abs().max()),
        "neighbors": float(torch.corrcoef(torch.stack([kept[:-1].flatten(), kept[1:].flatten()]).double())[0, 1]),
        "scale": float((y / x)[kept].mean()),
        "gradient where dropped": float(gradient[~kept].abs().max()),
        "gradient where kept": [float(gradient[kept].min()), float(gradient[kept].max())],
        "repeats": bool((again == y).all()),
        "differs": float(((other == 0) != ~kept).double().mean()),
        "evaluation": bool((drop(layer.eval(), x) == x).all()),
        "all": float(drop(nn.Dropout(1.0), x).abs().max()),
    }
    print(json.dumps(facts))
