"""log.jsonl, a run's log with one JSON record per line: written so that it can be cut back, read with care."""

import json
import os
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.terminal import warn

LOG = "log.jsonl"


class Log:
    """The log of a run in progress. Opened at the length a checkpoint names, it drops the records after it."""

    def __init__(self, path: Path, length: int) -> None:
        # unbuffered: readers see every line at once, and on a full disk nothing remains to be written on closing
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self.file = os.fdopen(handle, "r+b", buffering=0)
        size = os.fstat(handle).st_size
        if size < length:
            warn(f"{path} is {length - size} bytes shorter than its checkpoint expects; some records are lost")
        self.file.truncate(min(size, length))
        self.file.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        while line:  # a disk that fills up accepts a part
            line = line[self.file.write(line) :]

    def sync(self) -> int:
        """Force the log to disk; its length in bytes."""
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        self.file.close()


# ---- reading; the file may come from anywhere


def read_log(path: Path) -> list[dict[str, Any]]:
    """All records; raises UserError unless every line is a JSON object."""
    records = []
    try:
        with path.open("rb") as file:
            for count, line in enumerate(file, 1):
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"line {count} is no object")
                records.append(record)
    except json.JSONDecodeError:
        raise UserError(f"line {len(records) + 1} of {path} is no JSON; remove it, or restore the file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}), so there are no learning curves to show") from None
    return records


def record_field(record: dict[str, Any], key: str) -> dict[str, Any]:
    """A record inside a record; raises UserError where there is none."""
    value = record.get(key)
    if not isinstance(value, dict):
        raise UserError(f"the log has a record whose '{key}' is no object; restore the file")
    return value


def number_field(record: dict[str, Any], key: str) -> float:
    """A finite number of a record; raises UserError for anything else."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        raise UserError(f"the log has a record whose '{key}' is missing or no valid number; restore the file")
    return value


def last_report(path: Path, split: str = "test") -> dict[str, float]:
    """The last report on a split in a log, with averaged weights where the run has them; empty without one."""
    found = [record for record in read_log(path) if split in record]
    report = record_field(found[-1], "ema" if "ema" in found[-1] else split) if found else {}
    return {key: float(value) for key, value in report.items() if isinstance(value, float)}
