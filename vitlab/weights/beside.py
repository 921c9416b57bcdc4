"""What a file of weights cannot hold, in a small JSON beside it: `vit.pth` has `vit.pth.vitlab.json`.

It holds the settings that shapes do not determine, the image size, preprocessing, class names, provenance, a
multi-label model's thresholds, the temperature, and the sha256 of the weights: those of another file are an error,
never used.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.files import read_json, sha256, write_text
from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, Preprocess
from vitlab.settings import annotations, check_value, from_json, to_json
from vitlab.text import listed
from vitlab.weights.formats.base import CardPart, FormatDefaults, settings_of

FORMAT = "vitlab-beside/1"


def beside_path(weights: Path) -> Path:
    return weights.with_name(f"{weights.name}.vitlab.json")


def write_beside(config: ModelConfig, card: Card, weights: Path, path: Path) -> None:
    """Write the JSON for a file of weights, which may still have another name, to `path`."""
    settings = {name: value for name, value in to_json(settings_of(config)).items() if value is not None}
    data = {
        "format": FORMAT,
        "sha256": sha256(weights),
        "image_size": config.image_size,
        "settings": settings,
        "preprocess": to_json(card.preprocess),
        "labels": card.labels,
        "provenance": card.provenance,
        "thresholds": card.thresholds,
        "temperature": card.temperature,
    }
    write_text(path, json.dumps(data, indent=2) + "\n")


def read_beside(weights: Path) -> Mapping[str, Any]:
    """The JSON beside a file of weights, empty if there is none; a UserError if it belongs to other weights."""
    path = beside_path(weights)
    if not path.is_file():
        return {}
    data = read_json(path)
    if data.get("format") != FORMAT:
        raise UserError(f"{path} has format {data.get('format')!r}, not {FORMAT!r}; remove it to load {weights} alone")
    if data.get("sha256") != sha256(weights):
        raise UserError(
            f"{path} was written for other weights than {weights} (the sha256 differs); convert them again, or remove "
            "it to load the weights alone"
        )
    return data


def stored_settings(data: Mapping[str, Any]) -> FormatDefaults:
    """The settings in such a JSON, preprocessing included; untrusted, so every value is checked."""
    settings = data.get("settings")
    if not isinstance(settings, Mapping):
        raise UserError(f"'settings' must be an object, not {settings!r}")
    hints = annotations(FormatDefaults)
    checked = {name: check_value(value, hints[name], name) for name, value in settings.items() if name in hints}
    preprocess = check_value(data.get("preprocess"), Preprocess, "preprocess")
    return from_json(FormatDefaults, {**settings, **checked, "preprocess": preprocess})


def describe_parts(card: Card, parts: Iterable[CardPart]) -> str:
    """Parts of a card in words, for a message to those who load the weights elsewhere."""
    words: dict[CardPart, str] = {
        "preprocess": f"preprocessing ({describe_preprocess(card.preprocess)})",
        "labels": "class names",
        "thresholds": "the classes' thresholds",
        "temperature": f"the temperature (divide logits by {card.temperature:.6g} for its probabilities)",
    }
    return listed([words[part] for part in words if part in parts])


def describe_preprocess(p: Preprocess) -> str:
    mean, std = (", ".join(f"{x:g}" for x in color) for color in (p.mean, p.std))
    fit = "stretched" if p.fit == "stretch" else f"crop {p.crop:g}"
    return f"{p.interpolation}, {fit}, mean {mean}, std {std}"
