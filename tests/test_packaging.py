"""The declared dependencies: all imports, in versions that fit together and without known vulnerabilities."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vitlab

ROOT = Path(__file__).parents[1]
BROUGHT = {"wandb", "mlflow", "triton"}  # loggers in whatever version the user has; Triton in the one torch brings
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


@pytest.mark.slow
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


# ---- the built package


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What is needed to build."""
    folder = tmp_path / "sources"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "vitlab", folder / "vitlab", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


BUILD = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
PREDICT = """
import sys
sys.modules["matplotlib"] = None
import vitlab
print(vitlab.__file__, file=sys.stderr)
from vitlab.cli import main
sys.argv = ["vitlab", "predict", "photo.jpg", "--device", "cpu"]
main()
"""


@pytest.mark.slow
def test_wheel_and_source_archive_carry_the_model_in_the_box(sources: Path, tmp_path: Path) -> None:
    """Built without a network; the unpacked wheel answers, with a name and a picture, without optional packages."""
    (sources / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    box = {f"vitlab/box/{name}" for name in ("model.safetensors", "config.json", "README.md", "NOTICE", "photo.jpg")}
    (wheel,), (archive,) = (sources / "dist").glob("*.whl"), (sources / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        file.extractall(tmp_path / "installed")
    licenses = {name.partition(".dist-info/licenses/")[2] for name in names if ".dist-info/licenses/" in name}
    assert box <= names
    assert licenses == {"LICENSE", "vitlab/box/NOTICE"}
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)
    with tarfile.open(archive) as tar:
        assert box | {"LICENSE"} <= {name.partition("/")[2] for name in tar.getnames()}
    here = tmp_path / "here"
    here.mkdir()
    shutil.copy(tmp_path / "installed" / "vitlab" / "box" / "photo.jpg", here)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    words = [sys.executable, "-c", PREDICT]
    done = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(str(tmp_path / "installed"))
    assert done.stdout.splitlines()[1].split()[1] == "espresso"
    assert (here / "looked" / "photo-looked.png").stat().st_size > 1000


def test_the_box_is_small_enough() -> None:
    box = ROOT / "vitlab" / "box"
    sizes = {path.name: path.stat().st_size for path in box.iterdir()}
    assert sizes.pop("model.safetensors") <= 12_000_000
    assert sum(sizes.values()) < 200_000
