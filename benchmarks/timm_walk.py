"""Which of timm's ViTs load here, with equal outputs or not at all: python -m benchmarks.timm_walk [--only 'vit_b*']

Every architecture of timm's modules vision_transformer, deit and eva is built without pretrained weights, all its
tensors are drawn at random, and it is saved as on its hub: model.safetensors with a config.json that names the
architecture. `vitlab.load` reads the folder, and both compute the output for one image of the architecture's size.
Models of more than 100 million parameters have two layers. Refused ones are listed with the first tensor that the error
names, or its words.

The last column is about a file alone, without its config.json: the settings that must be given for the same model.
"""

import gc
import json
import math
import re
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.meta import meta_model
from vitlab.weights import load
from vitlab.weights.formats.base import OWN, FormatDefaults, ParsedCheckpoint, RawCheckpoint
from vitlab.weights.formats.table import check_tensors
from vitlab.weights.formats.timm import read
from vitlab.weights.formats.timm_families import find_family
from vitlab.weights.tensors import TensorFile

MODULES = ("vision_transformer", "deit", "eva")
LARGE = 100_000_000  # parameters
LIMIT = 2e-5  # of the largest difference, relative to the largest output, in float32


@dataclass(frozen=True)
class Walked:
    """What became of an architecture: the difference of outputs, or why it was refused."""

    module: str
    name: str
    family: str
    layers: int
    difference: float | None
    refused: str = ""
    give: str = ""  # settings that a file alone needs

    @property
    def verdict(self) -> str:
        if self.difference is None:
            return f"refused: {self.refused}"
        return "equal" if self.difference <= LIMIT else "DIFFERENT"


# ---- one architecture


def build(name: str, depth: int | None = None, device: str = "meta") -> Any:
    """A model without its initialization, which takes long; buffers that no file holds are computed."""
    args: dict[str, Any] = {} if depth is None else {"depth": depth}
    with torch.device("meta"):
        model: Any = timm.create_model(name, **args).eval()
    if device != "meta":
        model = model.to_empty(device=device)
        for part in model.modules():
            if hasattr(part, "init_non_persistent_buffers"):
                part.init_non_persistent_buffers()
    return model


def describe(model: Any, name: str) -> dict[str, Any]:
    """What timm writes to config.json for its hub, as far as a model without weights has it."""
    cfg = model.pretrained_cfg
    keys = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
    kept = {key: list(cfg[key]) if isinstance(cfg[key], tuple) else cfg[key] for key in keys if cfg.get(key)}
    return {"architecture": name, "num_features": model.num_features, "pretrained_cfg": kept}


def source_of(model: Any, config: dict[str, Any]) -> RawCheckpoint:
    """The model as a file whose tensors cannot be read."""

    def no_tensor(key: str) -> Tensor:
        raise AssertionError(f"{key} was read")

    shapes = {key: tuple(x.shape) for key, x in model.state_dict().items()}
    return RawCheckpoint("model", TensorFile(Path("model"), shapes, no_tensor), config, {})


def parse(model: Any, config: dict[str, Any]) -> ParsedCheckpoint:
    """The model by its shapes alone, its tensors checked; a UserError says why it is refused."""
    source = source_of(model, config)
    parsed = read(source, FormatDefaults(), None)
    check_tensors(parsed.table, meta_model(parsed.config).state_dict(), source.tensors)
    return parsed


def randomize(model: Any) -> None:
    """Every tensor random, with outputs of order one."""
    generator = torch.Generator().manual_seed(0)
    for key, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1 and key.endswith("weight"):
            noise = noise / math.sqrt(tensor[0].numel())
        elif key.endswith("weight"):
            noise = 1 + 0.2 * noise
        else:
            noise = 0.3 * noise
        tensor.copy_(noise)


@torch.no_grad()
def difference(model: Any, config: dict[str, Any]) -> float:
    """The largest difference of the outputs, relative to the largest output."""
    randomize(model)
    with tempfile.TemporaryDirectory() as folder:
        save_file(model.state_dict(), Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(config))
        ours = load(folder)
    height, width = ours.config.image_size
    x = torch.randn(1, 3, *config["pretrained_cfg"]["input_size"][1:], generator=torch.Generator().manual_seed(1))
    theirs = model(x)
    return float((ours(x[:, :, :height, :width]) - theirs).abs().max() / theirs.abs().max())


def needed(model: Any, named: ViTConfig) -> str:
    """The settings that make a file alone the same model."""
    try:
        alone = parse(model, {}).config
    except UserError as error:
        return f"refused: {reason(str(error))}"
    pairs = {key: (getattr(named, key), getattr(alone, key)) for key in OWN}
    return ", ".join(f"`{key}={value}`" for key, (value, other) in pairs.items() if value != other)


def reason(message: str) -> str:
    """The first tensor that an error names, or its words."""
    tensor = re.search(r"'([^']+)'", message)
    return f"`{tensor[1]}`" if tensor else message.removeprefix("model ")


def walk(module: str, name: str) -> Walked:
    shown = build(name)
    config = describe(shown, name)
    layers = len(shown.blocks)
    family = find_family(source_of(shown, {})).name
    try:
        parsed = parse(shown, config)
    except UserError as error:
        return Walked(module, name, family, layers, None, reason(str(error)))
    assert isinstance(parsed.config, ViTConfig)
    give = needed(shown, parsed.config)
    depth = 2 if sum(x.numel() for x in shown.state_dict().values()) > LARGE else None
    return Walked(module, name, family, depth or layers, difference(build(name, depth, "cpu"), config), give=give)


# ---- all of them


def table(rows: list[Walked]) -> str:
    lines = [
        "| architecture | module | family by its tensors | layers | difference | a file alone needs |",
        "|---" * 6 + "|",
    ]
    for r in rows:
        shown = "" if r.difference is None else f"{r.difference:.0e}"
        verdict = f"{r.verdict}" if r.difference is None or r.difference > LIMIT else shown
        lines.append(f"| `{r.name}` | {r.module} | {r.family} | {r.layers} | {verdict} | {r.give} |")
    return "\n".join(lines)


def summary(rows: list[Walked]) -> str:
    lines = ["| module | architectures | equal | refused | different |", "|---|---|---|---|---|"]
    for module in MODULES:
        own = [r for r in rows if r.module == module]
        counts = [sum(r.verdict.startswith(word) for r in own) for word in ("equal", "refused", "DIFFERENT")]
        lines.append(f"| `{module}` | {len(own)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main(
    only: Annotated[str, typer.Option(help="Architectures to walk, such as 'vit_small*'.")] = "*",
    keep: Annotated[Path | None, typer.Option(help="File for the tables, as Markdown.")] = None,
) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows: list[Walked] = []
    for module in MODULES:
        for name in timm.list_models(only, module=module):
            start = time.perf_counter()
            rows.append(walk(module, name))
            r = rows[-1]
            shown = r.verdict if r.difference is None else f"{r.verdict} {r.difference:.1e}"
            print(f"{module} {name}: {shown} ({time.perf_counter() - start:.0f} s) {r.give}", flush=True)
            gc.collect()
    text = f"{summary(rows)}\n\n{table(rows)}\n"
    print(text)
    if keep is not None:
        keep.write_text(text)


if __name__ == "__main__":
    typer.run(main)
