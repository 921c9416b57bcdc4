"""`vitlab train` with three convolutions in place of the patches: benchmarks/conv_stem.py RECIPE [key=value ...].

They halve the image's sides until one position is left of each patch, with 3x3 kernels, norms and GELU in between, and
a last one, 1x1, gives the width: the stem that "Early Convolutions Help Transformers See Better" (2021) found to make
training steadier. A part of a table (what_pays.sh), not of the package: such a run cannot be loaded again.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.cli import main
from vitlab.models.vit import ViT


class ConvStem(nn.Sequential):
    """Images (B, 3, height, width) to (B, D, h, w)."""

    def __init__(self, width: int, patch: int) -> None:
        halvings = patch.bit_length() - 1
        assert 1 << halvings == patch
        layers: list[nn.Module] = []
        before = 3
        for i in range(halvings):
            after = width >> (halvings - 1 - i)
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.GroupNorm(1, after), nn.GELU()]
            before = after
        super().__init__(*layers, nn.Conv2d(before, width, 1))

    @property
    def weight(self) -> Tensor:
        last = self[-1]
        assert isinstance(last, nn.Conv2d)
        return last.weight


def with_stem(init: Any) -> Any:
    def make(model: ViT, config: Any) -> None:
        init(model, config)
        with torch.random.fork_rng():  # the other weights stay those of a run without it
            model.embed = ConvStem(config.width, config.patch)  # type: ignore[assignment]

    return make


if __name__ == "__main__":
    ViT.__init__ = with_stem(ViT.__init__)  # type: ignore[method-assign]
    sys.argv[1:1] = ["train"]
    main()
