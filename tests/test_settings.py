"""A setting is declared once: one line in a dataclass, and `create`, the recipes' keys and the docs follow."""

import inspect
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.settings import Range, check_types, describe, from_json, parse_settings, takes
from vitlab.training.recipe import Recipe, change, describe_keys, flat, keys, make_recipe
from vitlab.weights.formats.base import FormatDefaults

ROOT = Path(vitlab.__file__).parent.parent
LINE = '    dropout: Annotated[float, RATE, "dropout rate after every dense layer but qkv"] = 0.0\n'
ADDED = '    sparkle: Annotated[float, RATE, "a setting that only this test has"] = 0.25\n'
SEEN = """
import inspect, json, sys, vitlab
from vitlab.cli import main
sys.path.insert(0, "docs")
import hooks
from vitlab.models.config import ViTConfig
from vitlab.models.names import configure
from vitlab.training.recipe import describe_keys, flat, keys, override
from vitlab.training.recipes import find
recipe = override(find("digits").recipe, ["sparkle=0.5"])
print(json.dumps({
    "create": inspect.signature(vitlab.create).parameters["sparkle"].default,
    "help": "a setting that only this test has" in vitlab.create.__doc__,
    "config": configure("B/16", {"sparkle": 0.125}).sparkle,
    "key": "sparkle" in keys(),
    "recipe": flat(recipe)["sparkle"],
    "table": [s.help for rows in describe_keys().values() for s in rows if s.name == "sparkle"],
    "site": "| `sparkle` | `float` | `0.25` | a setting that only this test has |" in hooks.settings_table(ViTConfig),
}))
sys.argv = ["vitlab", "recipes", "--keys"]
main()
"""


@pytest.mark.slow
def test_a_field_added_to_the_config_appears_everywhere(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "vitlab", tmp_path / "vitlab")  # with what is compiled: only the changed file is anew
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "hooks.py", tmp_path / "docs")
    config = tmp_path / "vitlab" / "models" / "config.py"
    assert LINE in config.read_text()
    config.write_text(config.read_text().replace(LINE, LINE + ADDED))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SEEN], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = '{"create": 0.25, "help": true, "config": 0.125, "key": true, "recipe": 0.5, "table": '
    found, listed = done.stdout.split("\n", 1)
    assert found == expected + '["a setting that only this test has"], "site": true}'
    assert "sparkle" in listed


@pytest.mark.parametrize("kind", [ViTConfig, Recipe, FormatDefaults])
def test_every_setting_has_help(kind: Any) -> None:
    assert all(setting.help for setting in describe(kind))


def test_arguments_are_the_fields() -> None:
    fields = set(inspect.signature(ViTConfig).parameters)
    assert set(inspect.signature(vitlab.create).parameters) == fields - {"patch", "stem"} | {"name"}
    assert set(inspect.signature(FormatDefaults).parameters) < set(inspect.signature(vitlab.load).parameters)


def test_unknown_arguments_name_the_nearest() -> None:
    with pytest.raises(UserError, match="'hads'; did you mean 'heads'"):
        vitlab.load("x.npz", hads=3)
    with pytest.raises(UserError, match="'prepocess'"):
        vitlab.convert("x.npz", "y", "timm", prepocess=3)


@dataclass(frozen=True)
class Small:
    count: Annotated[int, Range(1, 5), "how many"]
    rate: Annotated[float | None, Range(0, below=1), "how much"] = None
    pair: Annotated[tuple[int, float], Range(0), "two numbers"] = (1, 2.0)

    def __post_init__(self) -> None:
        check_types(self)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "count must be at least 1 and at most 5, not 0"),
        ({"count": 6}, "count must be at least 1 and at most 5, not 6"),
        ({"count": 1, "rate": 1.0}, "rate must be at least 0 and below 1, not 1.0"),
        ({"count": 1, "rate": float("nan")}, "rate must be at least 0 and below 1, not nan"),
        ({"count": 1, "pair": (1, -0.5)}, "pair must be at least 0, not (1, -0.5)"),
        ({"count": 1, "pair": (1, float("inf"))}, "pair must be"),
    ],
)
def test_ranges(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_json(Small, given)
    assert message in str(caught.value)


def test_of_two_values_of_one_setting_the_last_is_used_and_the_other_named(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_settings(["lr=0.1", "steps=3", "lr=0.1"], keys()) == {"lr": 0.1, "steps": 3}
    assert not caplog.messages
    assert parse_settings(["lr=0.1", "lr=0.2"], keys()) == {"lr": 0.2}
    assert caplog.messages == ["lr is given twice: 0.2 is used, not 0.1"]
    caplog.clear()
    assert parse_settings(["lr=0.1", "lr=0.2", "lr=0.3", "lr=0.1"], keys()) == {"lr": 0.1}
    assert caplog.messages == ["lr is given 4 times: 0.1 is used, not 0.2 or 0.3"]
    with pytest.raises(UserError, match="'lr' is not a setting"):
        parse_settings(["lr", "lr=0.1"], keys())


def test_tables_show_type_default_and_help() -> None:
    rows = [(s.name, s.type, s.default, s.help) for s in describe(Small)]
    assert rows == [
        ("count", "int", "", "how many"),
        ("rate", "float", "none", "how much"),
        ("pair", "int,float", "1,2.0", "two numbers"),
    ]


def test_each_part_of_a_pair_has_its_own_type() -> None:
    hints = {"pair": tuple[int, float]}
    assert parse_settings(["pair=2,9"], hints) == {"pair": (2, 9.0)}
    with pytest.raises(UserError, match=r"pair must be an integer, not '2\.5'"):
        parse_settings(["pair=2.5,9"], hints)


def test_a_function_shows_what_it_takes() -> None:
    @takes(Small, skip=("pair",), rate=0.5)
    def make(name: str, **settings: Any) -> Small:
        """Make one."""
        return from_json(Small, settings)

    assert str(inspect.signature(make)) == "(name: str, *, count: int | None = None, rate: float | None = 0.5) -> " + (
        f"{Small.__module__}.Small"
    )
    assert "count  how many (int)" in (make.__doc__ or "")


# ---- a recipe's flat keys


def test_flat_settings_find_their_place() -> None:
    recipe = make_recipe("B/16", "x", epochs=1, mixup=0.5, dropout=0.25, lr=0.5)
    assert (recipe.augment.mixup, recipe.model_settings, recipe.lr) == (0.5, {"dropout": 0.25}, 0.5)
    changed = change(recipe, steps=3, cutmix=1.0, pool="mean", dropout=None)
    assert (changed.steps, changed.epochs) == (3, None)
    assert (changed.augment.mixup, changed.augment.cutmix) == (0.5, 1.0)
    assert changed.model_settings == {"pool": "mean"}
    assert recipe.model_settings == {"dropout": 0.25}


def test_flat_is_what_keys_set() -> None:
    recipe = make_recipe("B/16", "x", epochs=1, drop_path=0.5)
    shown = {setting.name for rows in describe_keys().values() for setting in rows}
    assert set(flat(recipe)) - {"preprocess"} <= set(keys()) == shown


def test_the_models_settings_are_checked() -> None:
    with pytest.raises(UserError, match="'dropot'; did you mean 'dropout'"):
        Recipe("B/16", "x", epochs=1, model_settings={"dropot": 0.5})
    with pytest.raises(UserError, match="dropout must be at least 0 and below 1"):
        Recipe("B/16", "x", epochs=1, model_settings={"dropout": 2})
