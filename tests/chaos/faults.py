"""Faults at chosen moments of a process: it kills itself, or its disk is full. Armed from outside; vitlab has no hooks.

A point is a function of the package, as `module:name`, or an operation on the files below one folder: `open` (to
write), `write`, `truncate`, `fsync`, `rename`, `mkdir`, `remove`, and `save_file`, which writes outside Python.
"""

import builtins
import dataclasses
import errno
import importlib
import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from safetensors import SafetensorError

Kind = Literal["before", "within", "after", "full once", "full"]

OPERATIONS = ("open", "write", "truncate", "fsync", "rename", "mkdir", "remove", "save_file")
GROWING = "growing"  # counts all operations that a full disk refuses: all but removing
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

# By the part of a run that they belong to; a name that is gone is an error, so that none is lost unseen.
FUNCTIONS = {
    "start-up": (
        "vitlab.training.start:make_plan",
        "vitlab.training.start:start_model",
        "vitlab.training.start:write_recipe",
        "vitlab.training.loop:Run.take_up",
        "vitlab.training.loop:Run.make_loaders",
    ),
    "steps": (
        "vitlab.training.loop:Run.step",
        "vitlab.training.loop:Run.backward",
        "vitlab.training.loop:Run.move",
        "vitlab.training.loop:Run.flush",
        "vitlab.training.loop:Run.write",
    ),
    "evaluation": (
        "vitlab.training.loop:Run.evaluate",
        "vitlab.training.loop:Run.measure",
        "vitlab.training.loop:Run.save_best",
    ),
    "checkpoints": (
        "vitlab.training.loop:Run.save",
        "vitlab.training.checkpoint:make_room",
        "vitlab.training.checkpoint:seal",
        "vitlab.training.checkpoint:put_in_place",
        "vitlab.weights.files:flush",
        "vitlab.training.loop:Run.finish",
        *OPERATIONS,
    ),
}
POINTS = tuple(point for points in FUNCTIONS.values() for point in points)


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th time that a point is reached."""

    point: str
    call: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} call {self.call} of {self.point}"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Armed:
    """A process in which one fault is due; without one, it only counts how often every point is reached."""

    def __init__(self, folder: Path, fault: Fault | None) -> None:
        self.folder, self.fault = os.path.realpath(folder), fault
        self.counts: Counter[str] = Counter()
        self.struck = False

    def below(self, path: object) -> bool:
        """Whether a path is of the run: relative names come with a folder's handle, as rmtree has them."""
        if isinstance(path, int):
            return False
        name = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
        return name == self.folder or name.startswith((self.folder + os.sep, self.folder + "."))

    def reach(self, point: str, act: Callable[[], Any], tear: Callable[[], Any] | None = None) -> Any:
        """Do what belongs to a point, with the fault before, within or after it if it is due now."""
        self.counts[point] += 1
        growing = point in OPERATIONS and point != "remove"
        self.counts[GROWING] += growing
        fault = self.fault
        if fault is None:
            return act()
        now = fault.point == point or (fault.point == GROWING and growing)
        now = now and self.counts[fault.point] == fault.call
        if growing and ((self.struck and fault.kind == "full") or (now and fault.kind in ("full", "full once"))):
            self.struck = True
            if tear is not None:
                tear()
            raise FULL if point != "save_file" else SafetensorError(f"I/O error: {FULL.strerror} (os error 28)")
        if now and fault.kind == "before":
            die()
        if now and fault.kind == "within":
            (tear or act)()
            die()
        done = act()
        if now and fault.kind == "after":
            die()
        return done


# ---- arming


def arm(folder: Path, fault: Fault | None) -> Armed:
    """Watch this process from now on: there is no way back, so it should be a process of its own."""
    armed = Armed(folder, fault)
    for points in FUNCTIONS.values():
        for point in points:
            if ":" in point:
                wrap_function(armed, point)
    wrap_system(armed)
    wrap_open(armed)
    wrap_save_file(armed)
    return armed


def wrap_function(armed: Armed, point: str) -> None:
    module, _, name = point.partition(":")
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    plain = getattr(owner, last)

    def wrapped(*words: Any, **options: Any) -> Any:
        return armed.reach(point, lambda: plain(*words, **options))

    if path:
        setattr(owner, last, wrapped)
    else:
        put_everywhere(plain, wrapped)


def put_everywhere(plain: object, wrapped: object) -> None:
    """In all modules of the package that imported the name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vitlab":
            for key, value in list(vars(module).items()):
                if value is plain:
                    setattr(module, key, wrapped)


def wrap_system(armed: Armed) -> None:
    """The functions of `os`, through which pathlib and shutil go too."""
    named = {"rename": "rename", "replace": "rename", "mkdir": "mkdir", "unlink": "remove", "rmdir": "remove"}

    def wrap(name: str, point: str) -> None:
        plain = getattr(os, name)

        def wrapped(path: Any, *words: Any, **options: Any) -> Any:
            if options.get("dir_fd") is None and not armed.below(path):
                return plain(path, *words, **options)
            return armed.reach(point, lambda: plain(path, *words, **options))

        setattr(os, name, wrapped)

    for name, point in named.items():
        wrap(name, point)
    sync, opened = os.fsync, os.open

    def fsync(handle: int) -> None:
        armed.reach("fsync", lambda: sync(handle))

    def open_handle(path: Any, flags: int, *words: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and armed.below(path):
            return armed.reach("open", lambda: opened(path, flags, *words, **options))
        return opened(path, flags, *words, **options)

    os.fsync, os.open = fsync, open_handle  # type: ignore[assignment]


class Faulty(io.FileIO):
    """An unbuffered file whose writes are points; Python's buffers above it are the ordinary ones."""

    armed: Armed

    def write(self, data: Any) -> int:
        def half() -> None:
            io.FileIO.write(self, bytes(data)[: len(data) // 2])

        return self.armed.reach("write", lambda: io.FileIO.write(self, data), half)

    def truncate(self, size: int | None = None) -> int:
        return self.armed.reach("truncate", lambda: io.FileIO.truncate(self, size))


def wrap_open(armed: Armed) -> None:
    plain = io.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, *words: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+") or not armed.below(file):
            return plain(file, mode, buffering, *words, **options)
        raw_mode = mode.replace("b", "").replace("t", "")
        raw: Faulty = armed.reach("open", lambda: Faulty(file, raw_mode))
        raw.armed = armed
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *words, **options)

    io.open = builtins.open = opened  # type: ignore[assignment]


def wrap_save_file(armed: Armed) -> None:
    plain = safetensors.torch.save_file

    def save_file(tensors: Any, filename: Any, *words: Any, **options: Any) -> None:
        def write() -> None:
            plain(tensors, filename, *words, **options)

        def half() -> None:
            write()
            os.truncate(filename, os.path.getsize(filename) // 2)

        armed.reach("save_file", write, half)

    put_everywhere(plain, save_file)


def as_json(fault: Fault) -> dict[str, Any]:
    return dataclasses.asdict(fault)
