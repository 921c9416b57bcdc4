"""The command line: its help, its exit codes and what it prints."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from PIL import Image
from timing import assert_below, measure_until, seconds

from vitlab.cli import app
from vitlab.cli.help import GROUPS, join_name

VITLAB = Path(sys.executable).with_name("vitlab")
Command = Callable[..., tuple[int, str, str]]
VERBS = typer.main.get_group(app).commands


def vitlab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([VITLAB, *words], capture_output=True, text=True, timeout=120)


# ---- help


def test_help_answers_at_once() -> None:
    """Within 0.7 s or, on a slow machine, four times what Python takes for the libraries that print it."""
    assert vitlab("--help").returncode == 0  # and compiles the bytecode
    libraries = [sys.executable, "-c", "import typer, rich.console, rich.table"]

    def measure() -> tuple[float, float]:
        return seconds(lambda: vitlab("--help")), seconds(lambda: subprocess.run(libraries, check=True))

    measure_until(lambda took: took[0] < max(0.7, 4 * took[1]), measure)


def test_help_imports_no_heavy_package() -> None:
    code = """
import sys
from vitlab.cli import app, main
sys.argv = ["vitlab", "--help"]
try:
    main()
finally:
    print({"torch", "numpy", "PIL", "matplotlib"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_help_lists_verbs_in_the_order_of_use() -> None:
    assert list(VERBS)[:3] == ["demo", "finetune", "train"]
    assert len(VERBS) == 25


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_file_and_an_example(verb: str, command: Command) -> None:
    assert find_spec(f"vitlab.cli.{verb.split()[0]}") is not None
    code, out, _ = command(*verb.split(), "--help")
    assert code == 0
    assert "Examples:" in out
    assert f"vitlab {verb}" in out


def test_without_a_verb_there_is_the_help_page(command: Command) -> None:
    page = command("--help")
    assert "finetune" in page[1]
    assert command() == command("-v") == page


def test_verbs_are_in_groups(command: Command) -> None:
    """Each verb is in one group of `vitlab --help`."""
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(VERBS)
    _, out, _ = command("--help")
    parts = re.split(r"^(\w[\w ]*):$", out, flags=re.MULTILINE)[1:]
    verbs = (re.findall(r"^  (\w+(?: \w+)?)  ", part, re.MULTILINE) for part in parts[1::2])
    shown = dict(zip(parts[::2], verbs, strict=True))
    assert {title: tuple(shown[title]) for title in GROUPS} == GROUPS


@pytest.mark.parametrize("verb", VERBS)
def test_metavars_are_capitals_and_examples_are_single_lines(verb: str, command: Command) -> None:
    _, out, _ = command(*verb.split(), "--help")
    assert not re.search(r"[<{](bool|str|path|int|float|list)", out)
    options = out.partition("Options:")[2].partition("Examples:")[0]
    for line in re.findall(r"^  (-\S.*?)(?:  |$)", options, re.MULTILINE):
        assert re.fullmatch(r"(-\w, )?--[a-z0-9-]+( [A-Z=]+)?", line), line
    examples = out.partition("Examples:\n")[2].splitlines()
    assert VERBS[verb].epilog is not None
    assert [line.strip() for line in examples] == str(VERBS[verb].epilog).splitlines()


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["finetune", "photos", "--epochs", "3"], "epochs=3"),
        (["finetune", "photos", "--image-size=384"], "image_size=384"),
        (["train", "digits", "--drop-path", "0.1"], "drop_path=0.1"),
        (["train", "digits", "--seeds", "3"], "seeds=3"),
        (["bench", "digits", "--lr", "--seconds", "3"], "lr=VALUE"),
    ],
)
def test_a_setting_written_as_an_option(words: list[str], setting: str, command: Command) -> None:
    code, _, err = command(*words)
    assert code == 1
    assert err.startswith("error: there is no option --")
    assert err.endswith(f"written without dashes: {setting}\n")
    code, _, err = command(*words[:2], "--no-such-option")
    assert (code, "No such option" in err) == (2, True)


@pytest.mark.parametrize("words", [["-v", "models", "Ti/16"], ["models", "Ti/16", "--verbose"]])
def test_verbose_stands_anywhere(words: list[str], command: Command) -> None:
    log = logging.getLogger("vitlab")
    before = log.level
    try:
        assert command(*words)[0] == 0
        assert log.level == logging.DEBUG
    finally:
        log.setLevel(before)


def test_version(command: Command) -> None:
    import vitlab

    assert command("--version") == (0, f"vitlab {vitlab.__version__}\n", "")


ROOT = Path(__file__).parents[1]
PAGES = [str(page.relative_to(ROOT)) for page in sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")])]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_verbs_and_options_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines() if language in ("", "bash") else ():
            if match := re.search(r"\bvitlab (\w+(?: \w+)?)(.*?)(?: {3,}|#|$)", line):
                verb = join_name(match[1].split(), VERBS)[0]
                assert verb in VERBS, line
                known = {option for param in VERBS[verb].params for option in param.opts}
                assert set(re.findall(r"--[a-z0-9-]+", match[2])) <= known, line


# ---- models, cost, recipes


def test_the_list_of_recipes_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = command("recipes")
    assert "0.0006" in out
    assert "…" not in out


def test_cost(command: Command) -> None:
    code, out, err = command("cost", "B/16", "--images", "303M", "--epochs", "7", "--tflops", "100")
    assert code == 0, err
    assert "86,567,656" in out
    assert "223.5 exaFLOPs" in out  # the paper prints 224
    assert "223.5 petaFLOPs" in command("cost", "B/16", "--images", "303k", "--epochs", "7")[1]
    assert "25.87 days" in out  # 223.5e18 / 100e12 / 86400


def test_cost_with_settings_of_the_model(command: Command) -> None:
    code, out, err = command("cost", "Ti/16", "image_size=32x48", "positions=none", "pool=mean")
    assert code == 0, err
    assert [line.split()[-2] for line in out.splitlines() if "tokens" in line] == ["6"]


def test_models_lists_the_given_names(command: Command) -> None:
    code, out, err = command("models", "Ti/16", "R50x1")
    assert code == 0, err
    assert "5,717,416" in out
    assert "25,549,352" in out


def test_models_and_cost_do_not_import_torch() -> None:
    code = "import sys; from vitlab.cli import main; main()"
    for words in (["models"], ["cost", "B/16", "image_size=384"]):
        ends = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
        done = subprocess.run([sys.executable, "-c", ends, *words], capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False"), done.stderr


@pytest.mark.slow
def test_models_lists_all_within_two_seconds() -> None:
    def measure() -> float:
        return seconds(lambda: subprocess.run([VITLAB, "models"], check=True, capture_output=True))

    assert_below(2.0, measure)


# ---- errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cost", "Q/16"], "the sizes are Ti, S, B, L, H or g"),
        (["cost", "B/16", "image_size=225"], "use 224 or 240"),
        (["cost", "B/16", "heads=5"], "5 heads do not divide the width 768"),
        (["cost", "B/16", "dropout=-1"], "dropout must be at least 0"),
        (["cost", "B/16", "dropot=1"], "did you mean 'dropout'?"),
        (["cost", "B/16", "dropout"], "write key=value"),
        (["cost", "B/16", "--images", "many"], "--images must be a positive number"),
        (["cost", "B/16", "--epochs", "0"], "--epochs must be positive"),
        (["cost", "Ti/16", "--tflops", "-1"], "the speed must be positive"),
        (["models", "B/16", "--image-size", "100"], "use 96 or 112"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(words: list[str], message: str, command: Command) -> None:
    code, out, err = command(*words)
    assert code == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert out == ""


def test_an_error_ends_the_process_with_code_1() -> None:
    done = vitlab("bench", "digits", "--seconds", "0")
    assert done.returncode == 1
    assert done.stderr == "error: --seconds must be positive, not 0\n"


@pytest.mark.parametrize(
    ("package", "words", "extra"),
    [
        ("fastapi", ["serve", "RUN"], "serve"),
        ("onnxruntime", ["export", "RUN", "new.onnx"], "export"),
        ("matplotlib", ["inspect", "RUN", "FOLDER/a.png", "--out", "FOLDER/inside"], "plots"),
        ("sklearn", ["data", "digits"], "demo"),
        ("pyarrow", ["data", "FOLDER/a.parquet"], "data"),
        ("huggingface_hub", ["evaluate", "owner/name", "digits"], "hub"),
        ("tensorboard", ["train", "digits", "tensorboard=true", "steps=1", "warmup=0", "--out", "FOLDER/run"], "board"),
    ],
)
def test_a_missing_package_names_the_install_command(
    package: str,
    words: list[str],
    extra: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    users = (f"torch.utils.{package}",)  # which another test may have imported with it
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name.startswith(users)]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)  # importing it raises ImportError
    paths = {"RUN": str(model), "FOLDER": str(tmp_path), "new.onnx": str(tmp_path / "new.onnx")}
    code, _, err = command(*(paths.get(word, word.replace("FOLDER", str(tmp_path))) for word in words))
    assert code == 1
    assert f"pip install 'vitlab[{extra}]'" in err
    assert err.splitlines()[-1].startswith("error: ")
