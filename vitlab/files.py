"""Files: atomic writes, digests, locks, JSON from untrusted files, and the cache folder."""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safetensors import SafetensorError

from vitlab.errors import UserError
from vitlab.text import brief

if TYPE_CHECKING:
    from torch import Tensor

JSON_LIMIT = 10_000_000  # bytes; the header of a file with 1,000 tensors has some 100,000
DRAWN = ".vitlab-pictures"  # the file that marks a folder of drawn pictures, which is no class of a data set
unfinished: set[Path] = set()  # files being written; a process that must end at once removes them first


def parse_json(text: bytes, where: str, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A JSON object without duplicate keys, NaN or infinity, or UserError."""
    if len(text) > limit:
        raise UserError(f"{where} is {len(text):,} bytes long, above the limit of {limit:,}")
    try:
        data = json.loads(text.decode(), object_pairs_hook=_distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are both ValueErrors
        raise UserError(f"{where} is not valid JSON: {brief(error)}") from None
    if not isinstance(data, dict):
        raise UserError(f"{where} must hold a JSON object, not a {type(data).__name__}")
    return data


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    if path.stat().st_size > limit:
        raise UserError(f"{path} is longer than any valid file of its kind")
    return parse_json(path.read_bytes(), str(path), limit)


def check_names(names: Sequence[str]) -> None:
    """Raise UserError for class names with which a model's files could be written but not read again."""
    most = JSON_LIMIT * 9 // 10  # the rest is for what else the files have
    if (size := len(json.dumps(list(names), indent=2))) > most:
        few = f"files that describe a model are read up to {most / 1e6:g} MB"
        raise UserError(f"the names of {len(names):,} classes take {size / 1e6:.1f} MB, and {few}; use shorter names")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key occurs twice")
    return data


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")


def fsync(path: Path) -> None:
    """Force a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_tensors(tensors: "Mapping[str, Tensor]", path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of any new file here.

    The library renames a temporary file of mode 0600; an empty file made first shows which mode the umask and the
    folder give, without changing the umask of all threads to ask for it.
    """
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    path.chmod(mode)


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Report a full disk or a forbidden folder as a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {getattr(error, 'strerror', None) or brief(error)}") from None


@contextlib.contextmanager
def atomic_path(path: Path, folder: bool) -> Iterator[Path]:
    """A temporary path to write a file or a folder to; renamed to `path` at the end, or removed after an error."""
    if path.exists():
        raise UserError(f"{path} exists; remove it or name another place")
    place = path.with_name(f".{secrets.token_hex(4)}.{path.name}")  # keeps the ending, which names the kind of file
    unfinished.add(place)
    try:
        with write_errors(path):
            (place if folder else path.parent).mkdir(parents=True, exist_ok=True)
            yield place
            for file in [*(place.iterdir() if folder else ()), place]:
                fsync(file)
            place.rename(path)
            fsync(path.parent)
    finally:  # after the rename there is nothing here
        remove(place)
        unfinished.discard(place)


def remove(path: Path) -> None:
    """Remove a file or a folder, where there is one that can be removed."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_folder(path: Path, option: str = "--out") -> None:
    """Raise UserError, before the work rather than after it, if a folder of results cannot be made or written to."""
    place = path.expanduser().absolute()
    while not os.path.lexists(place):  # the folder that new ones would be made in
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except NotADirectoryError:
        raise UserError(f"{option} {path} cannot be used: {place} is a file; name a folder") from None
    except OSError as error:
        why = error.strerror or brief(error)
        raise UserError(f"{option} {path} cannot be used: nothing can be written in {place} ({why})") from None


def mark_pictures(folder: Path) -> None:
    """Make and mark the folder that pictures will be drawn into, unless it is there and may hold somebody's photos."""
    if folder.is_dir():
        return
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)  # another process may have been quicker
        write_text(folder / DRAWN, "vitlab drew these pictures: this folder is no class of photos\n")


def largest_number(data: object) -> int:
    """The largest integer anywhere in JSON."""
    if isinstance(data, Mapping | list | tuple):
        return max((largest_number(v) for v in (data.values() if isinstance(data, Mapping) else data)), default=0)
    return data if isinstance(data, int) else 0


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "wb", errors: Callable[[Path], Any] = write_errors) -> Iterator[IO[Any]]:
    """Open a file that replaces `path` when the block ends, and is removed where the block raises.

    `errors` turns an OSError into a UserError with a message of its own.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(new, mode) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
    finally:
        with contextlib.suppress(OSError):  # gone after the replacement; a read-only disk never had it
            new.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: complete, or not at all."""
    with atomic_file(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))  # paths that are no text keep their bytes


def read_text(path: Path) -> str:
    """The text of a file; one that cannot be read or is no UTF-8 is a UserError."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def cache_folder() -> Path:
    """VITLAB_DATA, else vitlab in XDG_CACHE_HOME, else ~/.cache/vitlab."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vitlab"
    return Path(os.environ.get("VITLAB_DATA") or home).expanduser()


@contextlib.contextmanager
def file_lock(path: str) -> Iterator[None]:
    """One process at a time, where the system has locks."""
    with open(path, "w") as lock:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
