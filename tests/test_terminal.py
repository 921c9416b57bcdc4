"""Output to the terminal: untrusted names send it no commands, break no line and stay recognizable."""

import io
import json
import logging
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.table import Table

import vitlab
from vitlab.cli.app import describe_error, main
from vitlab.errors import UserError
from vitlab.terminal import Terminal, printable

VITLAB = Path(sys.executable).with_name("vitlab")
HOSTILE = "[/red]\x1b[2J\x1b]0;title\x07\r\u202eab\x9b1m"
ESCAPED = "[/red]\\x1b[2J\\x1b]0;title\\x07\\r\\u202eab\\x9b1m"
FILE, ESCAPED_FILE = HOSTILE.replace("/", ""), ESCAPED.replace("/", "")  # a valid file name
CONTROLS = ("\x1b", "\x07", "\r", "\u202e", "\x9b", "Traceback")


Verb = Callable[..., tuple[int, str]]


@pytest.fixture
def verb(command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Verb:
    """Run a verb; returns its exit code and its output, which must not contain control characters."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own would catch the messages

    def run(*words: str | Path) -> tuple[int, str]:
        code, out, err = command(*map(str, words))
        assert not [each for each in CONTROLS if each in out + err]
        return code, out + err

    return run


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, ESCAPED),
        ("two\nlines\t", "two\\nlines\\t"),
        ("caf\udce9 \ud800", "caf\\udce9 \\ud800"),
        ("\u2066x\u2028\u200f\U000e0041", "\\u2066x\\u2028\\u200f\\U000e0041"),
        (
            "고양이 é 日本\u3000語 \u06a9\u062a\u0627\u0628\u200c\u0647\u0627 \U0001f468\u200d\U0001f469",
            None,
        ),  # unchanged
    ],
)
def test_printable(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)
    assert printable(text).encode()


def test_a_terminal_prints_strings_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    table = Table(HOSTILE, title=HOSTILE, caption=f"{HOSTILE} :smile:")
    table.add_row(HOSTILE)
    terminal.print(table)
    terminal.print(f"one\n{HOSTILE}")
    terminal.remark("note", HOSTILE + "\n")
    assert out.getvalue().count(ESCAPED) == 6
    assert ":smile:" in out.getvalue()
    assert not [each for each in CONTROLS if each in out.getvalue()]


def test_log_messages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.getLogger("vitlab").warning("the file %s", HOSTILE)
    assert capsys.readouterr().err == f"the file {ESCAPED}\n"


# ---- verbs


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A data set with hostile class and file names."""
    for name in (os.fsencode(FILE), b"caf\xe9", b"[bold]x"):
        folder = os.path.join(os.fsencode(tmp_path / "photos"), name)
        os.makedirs(folder)
        for i in range(4):
            Image.new("RGB", (16, 16), (40 * i, 0, 0)).save(os.path.join(os.fsdecode(folder), f"{FILE}{i}.png"))
    (tmp_path / "photos" / FILE / f"{FILE}.png").write_bytes(b"broken")
    return tmp_path / "photos"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = vitlab.create("Ti/8", image_size=16, classes=3, depth=1, width=32, mlp=64, heads=2)
    vitlab.save(model, tmp_path / "run", labels=(HOSTILE, "caf\\udce9", "[bold]x"))
    config = tmp_path / "run" / "config.json"
    data = json.loads(config.read_text())
    data["labels"][1] = "caf\udce9 \ud800"
    config.write_text(json.dumps(data))
    return tmp_path / "run"


def test_data(photos: Path, tmp_path: Path, verb: Verb) -> None:
    code, text = verb("data", photos, "--picture", tmp_path / "samples.png")
    assert code == 0
    assert ESCAPED_FILE in text
    assert "caf\\udce9" in text
    assert "[bold]x" in text
    assert (tmp_path / "samples.png").exists()


def test_data_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Verb) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for i in range(8):
            for ending, data in (("png", picture.getvalue()), ("cls", (HOSTILE if i % 2 else "[/]").encode())):
                member = tarfile.TarInfo(f"{i}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    code, text = verb("data", tmp_path / "set.tar", "--picture", tmp_path / "samples.png")
    assert code == 0
    assert ESCAPED in text


def test_predict(run: Path, photos: Path, verb: Verb) -> None:
    code, text = verb("predict", run, photos, "--top-k", "3", "--workers", "0")
    assert code == 0
    assert "[bold]x" in text
    assert "1 of 13 files could not be read" in text


@pytest.mark.parametrize("form", ["--csv", "--json"])
def test_predict_for_programs(run: Path, photos: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an ASCII stream, with a label that no encoding can represent."""
    monkeypatch.setattr(sys, "argv", ["vitlab", "predict", str(run), str(photos), "--top-k=3", "--workers=0", form])
    out, err = (io.TextIOWrapper(io.BytesIO(), "ascii") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(SystemExit) as stop:
        main()
    out.flush()
    err.flush()
    printed, errors = (stream.buffer.getvalue() for stream in (out, err) if isinstance(stream.buffer, io.BytesIO))
    assert stop.value.code == 0, errors
    assert b"\\ud800" in printed
    assert printed.decode("utf-8", "surrogateescape")
    assert not [each for each in CONTROLS if each in errors.decode()]


def test_evaluate(run: Path, photos: Path, verb: Verb) -> None:
    (photos / FILE / f"{FILE}.png").unlink()
    labels = photos.parent / "labels.txt"
    words = "evaluate", run, photos, "--split", "all", "--workers", "0", "--labels", labels
    labels.write_text("other\ncaf\\udce9\n[bold]x\n")
    code, text = verb(*words)
    assert code == 1
    assert ESCAPED_FILE in text.partition("error: ")[2]
    (photos / FILE).rename(photos / "[red]other")
    labels.write_text("[red]other\ncaf\\udce9\n[bold]x\n")
    code, text = verb(*words, "--out", photos.parent / "scores")
    assert code == 0
    assert "caf\\udce9" in text
    assert "[red]other" in text
    assert b"/caf\xe9/" in (photos.parent / "scores" / "predictions.csv").read_bytes()


def test_inspect(run: Path, photos: Path, tmp_path: Path, verb: Verb) -> None:
    code, _ = verb("inspect", run, photos / "[bold]x", "--out", tmp_path / "inside", "--figures", "rollout")
    assert code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("data", HOSTILE),
        ("predict", HOSTILE, "x.jpg"),
        ("evaluate", HOSTILE, "digits"),
        ("predict", "run", "http://[::1", "--allow-url"),
        ("predict", "run", "http://host:99999999/", "--allow-url"),
        ("finetune", "caf\udce9"),
    ],
)
def test_errors(words: tuple[str, ...], verb: Verb) -> None:
    code, text = verb(*words)
    assert code == 1
    assert text.startswith("error: ")
    assert text.count("\n") == 1


# ---- errors of the machine


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
            "memory",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "not enough memory"),
        (OSError(28, "No space left on device", "/a/b"), "/a/b cannot be used: No space left on device"),
        (OSError(30, "Read-only file system"), "a file cannot be used: Read-only file system"),
        (PermissionError(13, "Permission denied", b"/a/\xff"), "/a/\udcff cannot be used: Permission denied"),
        (UserError("no such thing"), "no such thing"),
        (RuntimeError("a bug"), None),
        (OSError("without a number"), None),
    ],
)
def test_describe_error(error: Exception, words: str | None) -> None:
    found = describe_error(error)
    assert (found is None) if words is None else (words in str(found))


def test_a_folder_that_cannot_be_created_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))
    tarfile.open(tmp_path / "a.tar", "w").close()
    code, text = verb("data", tmp_path / "a.tar")
    assert code == 1
    assert "cannot be written: Not a directory" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("allocate", [torch.zeros, bytearray])
def test_too_large_an_allocation_is_one_line(allocate: Callable[[int], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as error:
        allocate(1 << 48)
    assert str(describe_error(error.value)).startswith("there is not enough memory")


def test_a_closed_pipe_is_no_traceback() -> None:
    with subprocess.Popen([VITLAB, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate(timeout=30)
    assert b"Traceback" not in err
