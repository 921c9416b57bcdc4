"""How models are compiled, in training and in inference: by torch.compile, for one shape.

Without padding of strides: where a model has no convolution, Inductor of torch 2.11 reads the padding, which nothing
has written, in place of values (pytorch/pytorch#194281). A ViT whose patches are projected by a product got gradients
that were 40 times too large, without a word.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Of `ViT.forward` in one process: models of one shape share a graph, and a study has some dozens of shapes. Torch stops
# compiling at its own limit of 8.
MOST_GRAPHS = 256

HOW: dict[str, Any] = {"dynamic": False, "options": {"comprehensive_padding": False}}


def compile_in_place(module: nn.Module) -> None:
    """Let a module run compiled from its next call on; images of two sizes are two graphs."""
    allow_graphs()
    module.compile(**HOW)


def compiled(module: nn.Module) -> Callable[..., Any]:
    """A module, compiled, beside which it stays as it is."""
    allow_graphs()
    made: Callable[..., Any] = torch.compile(module, **HOW)
    return made


def allow_graphs() -> None:
    import torch._dynamo.config as dynamo  # takes a second

    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
