"""Files of DINOv2, DINOv3, MAE and CLIP with one thing wrong: each is refused with one line that names it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import originals
import pytest
import torch
from families import mostly_slow
from originals import as_tensors
from torch import Tensor

from vitlab.errors import UserError
from vitlab.weights import load

FILES = {
    "dinov2": originals.dinov2(registers=2),
    "dinov2 giant": originals.dinov2(swiglu=True),
    "dinov3": originals.dinov3(),
    "dinov3 plus": originals.dinov3(swiglu=True),
    "mae": originals.mae(decoder=True),
    "mae tuned": originals.mae(tuned=True),
    "clip": originals.clip(text=False),
}
SOME = mostly_slow(FILES, "clip")
OPTIONAL = {"register_tokens", "mask_token", "storage_tokens", "visual.proj"}  # a model without it is one too


def refused(tensors: Any, path: Path) -> str:
    """The error of `load`, which must be one line that names the file."""
    torch.save(tensors, path)
    with pytest.raises(UserError) as error:
        load(path, heads=originals.HEADS)
    message = str(error.value)
    assert path.name in message
    assert "\n" not in message
    return message


def draw(name: str) -> dict[str, Tensor]:
    return as_tensors(FILES[name], torch.float32)


def essential(name: str) -> list[str]:
    """The tensors that the model is made of: those of the first block, and what is outside of the blocks."""
    left = ("decoder_", "blocks.1.", "visual.transformer.resblocks.1.")
    return [key for key in FILES[name] if key not in OPTIONAL and not key.startswith(left)]


@pytest.mark.parametrize("name", SOME)
def test_a_tensor_is_missing(name: str, tmp_path: Path) -> None:
    for key in essential(name):
        if (name, key) == ("mae tuned", "pos_embed"):
            continue  # a ViT without positions, as timm has them
        tensors = draw(name)
        del tensors[key]
        refused(tensors, tmp_path / "bad.pth")


@pytest.mark.parametrize("name", SOME)
def test_a_tensor_has_another_name(name: str, tmp_path: Path) -> None:
    for key in essential(name):
        tensors = draw(name)
        tensors[f"{key}.odd"] = tensors.pop(key)
        refused(tensors, tmp_path / "bad.pth")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_tensor_has_another_shape(name: str, tmp_path: Path) -> None:
    changes: list[Callable[[Tensor], Tensor]] = [lambda x: x[None], lambda x: x.flatten()[:-1], lambda x: x[..., :0]]
    for key in essential(name):
        for changed in changes:
            tensors = draw(name)
            tensors[key] = changed(tensors[key]).clone()
            refused(tensors, tmp_path / "bad.pth")


@pytest.mark.parametrize("name", SOME)
def test_a_tensor_of_integers(name: str, tmp_path: Path) -> None:
    for key in essential(name):
        tensors = draw(name)
        tensors[key] = tensors[key].to(torch.int64)
        assert f"'{key}'" in refused(tensors, tmp_path / "bad.pth")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("extra", ["blocks.0.attn.relative_position_bias_table", "layers.0.downsample.norm.weight"])
def test_a_tensor_of_a_windowed_model_is_named(extra: str, name: str, tmp_path: Path) -> None:
    assert f"'{extra}'" in refused({**draw(name), extra: torch.zeros(3)}, tmp_path / "bad.pth")


@pytest.mark.parametrize("value", [float("nan"), 0.0, 1.0, 1e30])
def test_a_mask_that_is_none(value: float, tmp_path: Path) -> None:
    tensors = draw("dinov3")
    tensors["blocks.1.attn.qkv.bias_mask"].fill_(value)
    assert "'blocks.1.attn.qkv.bias_mask'" in refused(tensors, tmp_path / "bad.pth")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 1e30])
def test_periods_that_are_none(value: float, tmp_path: Path) -> None:
    tensors = draw("dinov3")
    tensors["rope_embed.periods"][1] = value
    assert "rope_embed.periods" in refused(tensors, tmp_path / "bad.pth")


def test_periods_for_no_number_of_heads(tmp_path: Path) -> None:
    for count in (3, 5, 100):
        periods = 100.0 ** (torch.arange(count) / count)
        assert "periods" in refused({**draw("dinov3"), "rope_embed.periods": periods}, tmp_path / "bad.pth")


def test_one_half_alone(tmp_path: Path) -> None:
    """A text tower or a decoder is no image model: the first tensors are named."""
    text = {key: x for key, x in as_tensors(originals.clip(), torch.float32).items() if not key.startswith("visual.")}
    assert "'positional_embedding'" in refused(text, tmp_path / "text.pth")
    decoder = {key: x for key, x in draw("mae").items() if key.startswith(("decoder_", "mask_"))}
    assert "'mask_token'" in refused(decoder, tmp_path / "decoder.pth")


def test_wrapped_twice_or_in_itself(tmp_path: Path) -> None:
    refused({"model": {"state_dict": draw("mae")}}, tmp_path / "twice.pth")
    loop: dict[str, Any] = {}
    loop["model"] = loop
    refused(loop, tmp_path / "loop.pth")
    refused({"teacher": 3}, tmp_path / "number.pth")
    refused({"teacher": {"backbone.patch_embed.proj.weight": torch.zeros(1)}}, tmp_path / "little.pth")


def test_huge_shapes_take_no_memory(tmp_path: Path) -> None:
    for key, shape in {"register_tokens": (1, 2**40, 0), "pos_embed": (1, 10**12, 0)}.items():
        refused({**draw("dinov2"), key: torch.empty(shape)}, tmp_path / "bad.pth")
