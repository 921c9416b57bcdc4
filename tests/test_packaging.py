"""The declared dependencies: all imports, in versions that fit together and without known vulnerabilities."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vitlab

ROOT = Path(__file__).parents[1]
BROUGHT = {"wandb", "mlflow"}  # loggers in whatever version the user has
NAMES = {"PIL": "pillow", "sklearn": "scikit-learn"}  # import names that are not the package's own
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LISTS = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
DECLARED = [Requirement(line) for lines in LISTS for line in lines if not line.startswith("vitlab")]


def imported_packages() -> set[str]:
    packages = set()
    for path in Path(vitlab.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                packages.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
    return packages - set(sys.stdlib_module_names) - {"vitlab"} - BROUGHT


def test_imported_packages_are_declared() -> None:
    names = {requirement.name.replace("-", "_").lower() for requirement in DECLARED}
    assert {NAMES.get(name, name).replace("-", "_").lower() for name in imported_packages()} <= names


def test_the_pinned_versions_are_allowed() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}
    for requirement in DECLARED:
        version = pinned[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement} does not allow the pinned {version}"


@pytest.mark.parametrize(
    ("name", "vulnerable"),
    [  # the last versions with vulnerabilities that matter to code that reads untrusted files and requests
        ("pillow", "12.2.0"),
        ("h11", "0.14.0"),
        ("starlette", "0.49.0"),
        ("python-multipart", "0.0.29"),
        ("pyarrow", "23.0.0"),
    ],
)
def test_vulnerable_versions_are_excluded(name: str, vulnerable: str) -> None:
    specifiers = [requirement.specifier for requirement in DECLARED if requirement.name == name]
    assert specifiers
    assert not any(specifier.contains(vulnerable) for specifier in specifiers)


def test_every_bound_is_a_lower_one() -> None:
    assert all(re.fullmatch(r">=[0-9.]+", str(requirement.specifier)) for requirement in DECLARED)


def test_the_version_has_one_source() -> None:
    assert "version" in PROJECT["dynamic"]
    assert importlib.metadata.version("vitlab") == vitlab.__version__


def test_data_files_are_part_of_the_package() -> None:
    """An installed copy has every file beside the code that the code reads."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["vitlab"]
    package = ROOT / "vitlab"
    declared = {path for pattern in config for path in package.glob(pattern)}
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert package / "data" / "imagenet.tsv" in files
    assert package / "data" / "imagenet21k.tsv.gz" in files
    assert set(files) <= declared


def test_public_names_are_importable() -> None:
    assert all(getattr(vitlab, name).__doc__ for name in vitlab.__all__)
    assert set(vitlab.__all__) <= set(dir(vitlab))
