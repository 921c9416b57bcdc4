"""The scripts and notebooks in examples/ run offline, as their first lines describe, and leave what they promise."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("0*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/, in which they share one small model."""
    return shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("examples") / "copy")


def test_there_are_four_scripts_and_two_notebooks() -> None:
    assert (len(SCRIPTS), len(NOTEBOOKS)) == (4, 2)
    for script in SCRIPTS:
        text = ast.get_docstring(ast.parse(script.read_text()))
        assert text is not None
        assert f"examples/{script.name}" in text


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_run_offline(script: Path, folder: Path) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if "04" in script.name else []
    done = subprocess.run(
        [sys.executable, *start, script.name],
        cwd=folder,
        env=os.environ | OFFLINE,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    expected = {
        "01": "%",
        "02": "runs/example-finetuned",
        "03": "most attended patch",
        "04": "runs/example-distributed",
    }
    assert expected[script.name[:2]] in done.stdout
    if script.name.startswith("03"):
        assert list((folder / "runs" / "example" / "inside").rglob("classes.png"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_offline(notebook: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for key, value in OFFLINE.items():
        monkeypatch.setenv(key, value)
    content = nbformat.read(folder / notebook.name, as_version=4)
    nbclient.NotebookClient(content, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
