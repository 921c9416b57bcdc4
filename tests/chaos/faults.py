"""Faults at chosen moments of a process: it kills itself, or its disk is full. Armed from outside; vitlab has no hooks.

A point is a function of the package, as `module:name`, or an operation on the files below one folder: `open` (to
write), `write`, `truncate`, `fsync`, `rename`, `mkdir`, `remove`, and `save_file`, which writes outside Python.
"""

import builtins
import errno
import importlib
import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from safetensors import SafetensorError

Kind = Literal["before", "within", "after", "full once", "full"]

OPERATIONS = ("open", "write", "truncate", "fsync", "rename", "mkdir", "remove", "save_file")
SYSTEM = {"rename": "rename", "replace": "rename", "mkdir": "mkdir", "unlink": "remove", "rmdir": "remove"}
SYSTEM |= {"remove": "remove", "fsync": "fsync", "write": "write", "truncate": "truncate", "ftruncate": "truncate"}
GROWING = "growing"  # counts all operations that fail on a full disk: all but removing
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

# By the part of a run that they belong to; a name that no longer exists is an error.
FUNCTIONS = {
    "start-up": (
        "vitlab.training.setup:prepare_run",
        "vitlab.training.setup:initial_model",
        "vitlab.training.setup:write_recipe",
        "vitlab.training.trainer:Trainer.restore",
        "vitlab.data.open:open_data",
    ),
    "steps": (
        "vitlab.training.trainer:Trainer.step",
        "vitlab.training.trainer:Trainer.accumulate",
        "vitlab.training.trainer:Trainer.optimizer_step",
        "vitlab.training.recorder:Recorder.flush",
        "vitlab.training.recorder:Recorder.write",
    ),
    "evaluation": (
        "vitlab.training.loop:Run.evaluate",
        "vitlab.training.trainer:Trainer.measure",
        "vitlab.training.saver:Saver.save_best",
    ),
    "checkpoints": (
        "vitlab.training.saver:Saver.save",
        "vitlab.training.checkpoint:make_new_folder",
        "vitlab.training.checkpoint:write_meta",
        "vitlab.training.checkpoint:commit_folder",
        "vitlab.files:fsync",
        "vitlab.training.saver:Saver.save_final",
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
    """A process in which one fault will happen; without one, it only counts how often every point is reached."""

    def __init__(self, folder: Path, fault: Fault | None) -> None:
        self.folder, self.fault = os.path.realpath(folder), fault
        self.counts: Counter[str] = Counter()
        self.struck = False

    def below(self, path: Any) -> bool:
        """Whether a path, or a file's number, is of the run."""
        try:
            name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(os.fsdecode(path))
        except OSError:
            return False
        return name == self.folder or name.startswith((self.folder + os.sep, self.folder + "."))

    def reach(self, point: str, act: Callable[[], Any], tear: Callable[[], Any] | None = None) -> Any:
        """Call the function of a point, with the fault before, within or after it if this is its call."""
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
    wrap_save_file(armed)  # first: it cuts files short by the plain function
    wrap_system(armed)
    wrap_open(armed)
    return armed


def wrap_function(armed: Armed, point: str) -> None:
    module, _, name = point.partition(":")
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    plain = getattr(owner, last)

    def wrapped(*args: Any, **options: Any) -> Any:
        return armed.reach(point, lambda: plain(*args, **options))

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
    """The functions of `os`, through which pathlib and shutil go too. rmtree names files below a folder's number."""
    for name, point in SYSTEM.items():
        setattr(os, name, wrapped_system(armed, getattr(os, name), point))
    opened = os.open

    def open_number(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and armed.below(path):
            return armed.reach("open", lambda: opened(path, flags, *args, **options))
        return opened(path, flags, *args, **options)

    os.open = open_number


def wrapped_system(armed: Armed, plain: Callable[..., Any], point: str) -> Callable[..., Any]:
    def wrapped(path: Any, *args: Any, **options: Any) -> Any:
        folder = options.get("dir_fd")
        if not armed.below(path if folder is None else folder):
            return plain(path, *args, **options)
        half = None
        if point == "write":
            half = partial(plain, path, bytes(args[0])[: len(args[0]) // 2])
        return armed.reach(point, lambda: plain(path, *args, **options), half)

    return wrapped


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

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+") or not armed.below(file):
            return plain(file, mode, buffering, *args, **options)
        raw_mode = mode.replace("b", "").replace("t", "")
        # of a number, the opening was a point already
        raw = Faulty(file, raw_mode) if isinstance(file, int) else armed.reach("open", lambda: Faulty(file, raw_mode))
        raw.armed = armed
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *args, **options)

    io.open = builtins.open = opened


def wrap_save_file(armed: Armed) -> None:
    plain, cut = safetensors.torch.save_file, os.truncate

    def save_file(tensors: Any, filename: Any, *args: Any, **options: Any) -> None:
        def write() -> None:
            plain(tensors, filename, *args, **options)

        def half() -> None:
            write()
            cut(filename, os.path.getsize(filename) // 2)

        armed.reach("save_file", write, half)

    safetensors.torch.save_file = save_file  # for imports inside functions
    put_everywhere(plain, save_file)
