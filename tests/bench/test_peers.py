"""Other packages' models compute the same function as ours: with the same weights, the same logits."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import Randomize
from torch import nn

import vitlab
from vitlab.bench.peers import LogitsOf, NotThere, make_peer
from vitlab.cost import quick_cost
from vitlab.models.config import ModelConfig
from vitlab.models.names import configure

SMALL = {"image_size": 32, "depth": 2, "width": 24, "mlp": 50, "heads": 2, "classes": 5}


def peer(name: str, config: ModelConfig) -> nn.Module:
    return make_peer(name, config, quick_cost(config).parameters).eval()


@pytest.mark.parametrize("name", ["timm", "torchvision", pytest.param("transformers", marks=pytest.mark.slow)])
def test_logits_are_ours(name: str, tmp_path: Path, randomize: Randomize) -> None:
    model = randomize(vitlab.create("Ti/8", **SMALL)).eval()
    theirs = peer(name, model.config)
    vitlab.save(model, tmp_path / "ours")
    if isinstance(theirs, LogitsOf):
        vitlab.convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
        theirs.model = type(theirs.model).from_pretrained(tmp_path / "theirs")  # type: ignore[attr-defined]
    else:
        vitlab.convert(tmp_path / "ours", tmp_path / "theirs.safetensors", name)
        theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "theirs.safetensors"))
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert (theirs(images) - model(images)).abs().max() < 1e-4 * model(images).std()


@pytest.mark.parametrize("name", ["R+Ti/16", pytest.param("R26+S/32", marks=pytest.mark.slow)])
def test_hybrids_of_timm_have_as_many_parameters(name: str) -> None:
    assert peer("timm", configure(name, {"image_size": 64}))


@pytest.mark.slow
def test_a_width_that_its_ratio_rounds() -> None:
    assert peer("timm", configure("g/14", {"depth": 1}))  # 6144 / 1408, times 1408 again


def test_what_a_package_lacks_is_a_reason() -> None:
    with pytest.raises(NotThere, match="has no such model"):
        peer("timm", configure("R50+Ti/16", {"image_size": 32}))
    with pytest.raises(NotThere, match="has no such model"):
        peer("torchvision", configure("R50x1", {}))
    with pytest.raises(NotThere, match="takes square images alone"):
        peer("transformers", configure("Ti/16", {"image_size": (32, 48)}))


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchvision", None)  # importing it raises ImportError
    with pytest.raises(NotThere, match="is not installed"):
        peer("torchvision", configure("Ti/16", {}))
