"""The structure of the package: imports run one way, without circles, and file names are specific."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import vitlab

ROOT = Path(vitlab.__file__).parent
# From bottom to top; a module may import from its own room or from rooms below it.
ROOMS = (
    *("errors", "text", "html", "files", "settings", "signals", "terminal", "device"),
    *("models", "kernels", "data", "counting", "cost", "plots", "weights", "analysis", "inference", "evaluation"),
    *("training", "prediction", "export", "report", "finetuning", "serving", "studies", "bench", "demo", "cli"),
)
FILES = sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in FILES}


def imports(tree: ast.AST) -> Iterator[str]:
    """The package's modules that are imported in this code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    """Those that run when the module is imported, which a circle would break."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)


def room(module: str) -> int:
    """The position in ROOMS; `vitlab` itself is the lowest: its names are lazy."""
    return ROOMS.index(module.split(".")[1]) if "." in module else -1


def test_every_room_is_known() -> None:
    assert {module.split(".")[1] for module in MODULES if "." in module} <= set(ROOMS)


def test_imports_run_one_way() -> None:
    wrong = []
    for path in FILES:
        module = module_name(path)
        if module != "vitlab":
            above = [other for other in imports(ast.parse(path.read_text())) if room(other) > room(module)]
            wrong += [f"{module} imports {other}" for other in above]
    assert not wrong


def test_no_circles_between_files() -> None:
    graph = {}
    for path in FILES:
        module = module_name(path)
        # importing a.b runs the package a first, whose own imports of a.b are no circle
        others = {name for name in top_level_imports(ast.parse(path.read_text())) if name != module}
        graph[module] = {name for name in others if not module.startswith(name + ".")}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_file_names_are_specific() -> None:
    names = {path.stem for path in FILES}
    assert not names & {"utils", "util", "misc", "common", "helpers"}


def test_the_model_is_short() -> None:
    assert len((ROOT / "models" / "vit.py").read_text().splitlines()) <= 330


def test_models_are_compiled_in_one_place() -> None:
    """With the options that keep gradients right; a comparison compiles all packages as their users do."""
    found = {
        module_name(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "compile"
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "re")
    }
    assert found == {"vitlab.kernels.compiling", "vitlab.bench.compare"}
