"""`python -m chaos.fuzz_one TARGET FOLDER SECONDS SEED`: one reader under Atheris, in a process with limits.

Failures are written to FOLDER/failures.jsonl, beside the inputs that caused them; the number of inputs tried, to
FOLDER/tried.
"""

import hashlib
import json
import logging
import os
import random
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

MEMORY = 1 << 30  # bytes that an input may take, above what the process has before it
ADDRESSES = 4 << 30  # bytes of address space above it, which hold guard pages and maps besides
SECONDS = 20  # that an input may take
LONGEST = 1 << 17  # bytes of an input
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {  # by event: the arguments with the changed path and with the folder of a relative one
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.chmod": ((0, 2),),
    "os.symlink": ((1, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.truncate": ((0, None),),
}
PROGRAMS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.connect")


class Forbidden(BaseException):
    """Raised by the audit hook; no reader may catch it."""


class Watch:
    """An audit hook: writes outside the folder and started programs are refused and recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.on, self.seen = os.path.realpath(folder), False, ""
        sys.addaudithook(self.look)

    def look(self, event: str, words: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(words[2], int) and words[2] & WRITING:
            self.inside(event, words[0], -1)
        elif event in CHANGES:
            for path, folder in CHANGES[event]:
                self.inside(event, words[path], -1 if folder is None else words[folder])
        elif event in PROGRAMS and not harmless(event, words):
            self.refuse(f"runs a program or calls out: {event} {words!r:.200}")

    def inside(self, event: str, path: Any, folder: int) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # of a file that was opened before
        base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else ""
        name = os.path.realpath(os.path.join(base, os.fsdecode(path)))
        if name != os.devnull and not name.startswith(self.folder + os.sep):
            self.refuse(f"writes outside its folder: {event} {name!r:.200}")

    def refuse(self, what: str) -> None:
        self.seen = what
        raise Forbidden(what)


def harmless(event: str, words: tuple[Any, ...]) -> bool:
    """Pictures are decoded by our own worker processes: this Python, reached by local sockets."""
    if event == "socket.connect":
        return isinstance(words[1], str | bytes)
    return sys.executable in (os.fsdecode(word) for word in words[:1] if isinstance(word, str | bytes))


class Trial:
    """Tries inputs on one reader and keeps the first of every kind of failure."""

    def __init__(self, name: str, folder: Path) -> None:
        from chaos.targets import REFUSED, TARGETS

        logging.disable()
        warnings.simplefilter("ignore")
        self.folder, self.refused = folder, REFUSED
        home = folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        os.environ |= {"VITLAB_DATA": str(home), "TMPDIR": str(home), "HOME": str(home)}
        self.target = TARGETS[name]
        (folder / "made").mkdir()
        (folder / "place").mkdir()
        self.seeds = self.target.seeds(folder / "made")
        self.read = self.target.reader(folder / "place")
        self.watch = Watch(folder)
        self.known: set[str] = set()
        self.tried = self.taken = 0

    def one(self, data: bytes) -> None:
        began, self.watch.seen = time.monotonic(), ""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.tried += 1
        self.watch.on = True
        try:
            self.read(data)
            self.taken += 1
        except self.refused:
            pass
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.watch.on = False
            if not self.watch.seen:
                self.keep(data, f"{type(error).__name__} {where(error)}", f"{error!s:.200}")
        finally:
            self.watch.on = False
        if self.watch.seen:
            self.keep(data, self.watch.seen, "")
        took = time.monotonic() - began
        if took > SECONDS:
            self.keep(data, "slow", f"{took:.0f} s")
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
        if grown > MEMORY:
            self.keep(data, "large", f"{grown / 1e9:.1f} GB")

    def keep(self, data: bytes, kind: str, detail: str) -> None:
        if kind in self.known:
            return
        self.known.add(kind)
        name = f"input-{hashlib.sha256(data).hexdigest()[:12]}"
        (self.folder / name).write_bytes(data)
        with (self.folder / "failures.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "detail": detail, "input": name}) + "\n")


def where(error: BaseException) -> str:
    """The innermost line of the package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/vitlab/" in frame.filename]
    return f"at vitlab/{frames[-1].filename.rpartition('/vitlab/')[2]}:{frames[-1].lineno}" if frames else "in the test"


def limit() -> int:
    """Limit the address space; return the megabytes that may be resident."""
    pages, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    most = pages * resource.getpagesize() + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return (resident * resource.getpagesize() + MEMORY) >> 20


def main(name: str, folder: Path, seconds: int, seed: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["vitlab", "PIL"]):
        trial = Trial(name, folder)
    corpus = folder / "corpus"
    corpus.mkdir()
    for i, data in enumerate(trial.seeds):
        (corpus / f"seed{i}").write_bytes(data)

    def change(data: bytes, longest: int, number: int) -> bytes:
        draw = random.Random(number)
        changed = atheris.Mutate(data, longest) if draw.random() < 0.4 else trial.target.mutate(data, draw)
        return bytes(changed[:longest])

    noted = 0.0

    def one(data: bytes) -> None:
        nonlocal noted
        trial.one(data)
        if time.monotonic() - noted > 0.2:  # regularly: the process may end at any input
            (folder / "tried").write_text(f"{trial.tried} {trial.taken}")
            noted = time.monotonic()

    options = [f"-max_total_time={seconds}", f"-seed={seed + 1}", f"-max_len={LONGEST}", f"-timeout={SECONDS}"]
    options += [f"-rss_limit_mb={limit()}", f"-artifact_prefix={folder}/", "-print_final_stats=1", "-verbosity=1"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
