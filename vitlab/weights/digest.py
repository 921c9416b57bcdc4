"""One hash of a model's tensors and of what else its values depend on."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch


def digest_model(about: list[object], tensors: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
