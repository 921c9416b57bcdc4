"""What a server's process and its children hold: memory, files, processes."""

import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))  # where `servers` is


@dataclass(frozen=True)
class Held:
    megabytes: float
    files: int
    children: int

    def __str__(self) -> str:
        return f"{self.megabytes:.0f} MB, {self.files} files, {self.children} children"


def held(pid: int) -> Held:
    """Of the process and all its children together; files are the process's own."""
    process = psutil.Process(pid)
    children = process.children(recursive=True)
    size = process.memory_info().rss
    for child in children:
        try:
            size += child.memory_info().rss
        except psutil.NoSuchProcess:  # a worker that has just been replaced
            continue
    return Held(size / 1e6, process.num_fds(), len(children))
