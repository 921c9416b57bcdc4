"""The house keeps its shape: imports run one way, and no file's name says nothing."""

import ast
from pathlib import Path

import vitlab

ROOT = Path(vitlab.__file__).parent
# Lower floors first; a module may import from its own floor or below.
FLOORS = [
    {"config", "device", "terminal"},
    {"models", "data"},
    {"cost", "plots"},
    {"weights"},
    {"evaluation", "analysis"},
    {"training", "recipes", "predict", "export", "demo"},
    {"studies", "serving", "report", "bench"},
    {"cli", "__init__"},
]


def floor(room: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vitlab":
            found |= {node.module.split(".")[1]} if "." in node.module else {alias.name for alias in node.names}
    return found & {room for rooms in FLOORS for room in rooms}


def test_imports_run_one_way() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for other in imports(path):
            assert floor(other) <= floor(room), f"{path.relative_to(ROOT)} imports {other}, which stands above it"


def test_file_names_say_something() -> None:
    names = {path.stem for path in ROOT.rglob("*.py")}
    assert not names & {"utils", "util", "misc", "common", "helpers"}


def test_vit_reads_in_one_sitting() -> None:
    assert len((ROOT / "models" / "vit.py").read_text().splitlines()) <= 300
