"""The folder of a study: who runs which job, and what came out.

OUT/study.json                 the study and its settings; another study or other settings are refused, but more seeds
OUT/sets.json                  what the data sets were, by their images' names, sizes and labels
OUT/jobs/NAME/run              the run folder of a training run
OUT/jobs/NAME/result.json      a finished job: its command and its numbers, or how it diverged
OUT/jobs/NAME/error.json       a job that failed the last time; the next call tries it again
OUT/jobs/NAME/.lock            locked by the process that runs the job; the system drops the lock with the process
OUT/.machine-HOST              shared by the processes of a machine; one that measures times has it for itself
OUT/table.csv, table.md, study.html                      written again after every finished row
OUT/figure.png, figure.svg                               the same, but for the last half minute; complete at the end

So several processes, also of several machines with one file system, can work in one folder: none does what another has
done or is doing.
"""

import json
import math
import socket
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from vitlab.errors import UserError
from vitlab.files import file_lock, mark_pictures, read_json, remove, write_text
from vitlab.settings import check_value
from vitlab.studies.request import Request, slug
from vitlab.studies.study import JOBS, Job, Outcome, Study, Train, job_folder
from vitlab.training.lock import HELD, Held, folder_lock
from vitlab.training.recipe import LOOSE

ABOUT, SETS, RESULT, ERROR = "study.json", "sets.json", "result.json", "error.json"


@dataclass(frozen=True)
class Result:
    """A finished job as its file has it."""

    command: str
    numbers: dict[str, float]
    about: dict[str, float]
    seconds: float
    diverged: str = ""  # how, where it did; there are no numbers then


@dataclass(frozen=True)
class Place:
    """A study's folder."""

    out: Path

    def open(self, study: Study, request: Request, sets: Mapping[str, str]) -> None:
        """Begin a study here, or continue it, also with more seeds; `sets` are the digests of its data sets by name.

        Raises UserError where the folder has another study, or results on other images of a set.
        """
        mark_pictures(self.out)
        with file_lock(str(self.out / ".open")):
            about, images = self.out / ABOUT, self.out / SETS
            stored, wanted = read_json(about) if about.exists() else {}, describe(study, request)
            if stored:
                check_same(self.out, stored, wanted)
            begun = next(self.out.glob(f"{JOBS}/*/{RESULT}"), None) is not None
            known = read_json(images) if begun and images.exists() else {}
            changed = next((name for name, digest in sets.items() if known.get(name, digest) != digest), None)
            if changed is not None:
                fix = "put them back, or use another --out"
                raise UserError(f"the images of {changed} have changed since the study in {self.out} began; {fix}")
            for path, before, now in ((about, stored, wanted), (images, known, {**known, **sets})):
                if before != now:
                    write_text(path, json.dumps(now, indent=1) + "\n")

    # ---- jobs

    def result(self, job: Job) -> Result | None:
        """What a finished job measured; None where it is not finished."""
        path = job_folder(self.out, job) / RESULT
        if not path.is_file():
            return None
        try:
            data = read_json(path)
            numbers = {key: float(value) for key, value in check_value(data.get("numbers"), dict, "numbers").items()}
            about = {key: float(value) for key, value in check_value(data.get("about"), dict, "about").items()}
            diverged = check_value(data.get("diverged", ""), str, "diverged")
            return Result(str(data.get("command")), numbers, about, float(data.get("seconds", 0)), diverged)
        except (UserError, OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} cannot be read ({error}); remove it, and its job runs again") from None

    def error(self, job: Job, since: float = 0.0) -> str | None:
        """Why a job failed the last time, if that was not before `since`, as time.time counts."""
        path = job_folder(self.out, job) / ERROR
        try:
            data = read_json(path)
            return str(data.get("error")) if float(data.get("time", 0)) >= since else None
        except (UserError, OSError, ValueError, TypeError):
            return None

    def write_result(self, job: Job, outcome: Outcome, seconds: float) -> None:
        """Note that a job is finished; UserError for what is no number."""
        found = replace(outcome, numbers=plain_numbers(outcome.numbers), about=plain_numbers(outcome.about))
        data = {"format": "vitlab/1", "command": job.command(self.out), **asdict(found), "seconds": round(seconds, 1)}
        folder = job_folder(self.out, job)
        write_text(folder / RESULT, json.dumps(data, indent=1) + "\n")
        remove(folder / ERROR)
        job.clean(self.out)

    def clean(self, jobs: Iterable[Job]) -> None:
        """Remove what finished jobs have left: a process may be killed between its result and that."""
        for job in jobs:
            if self.result(job) is not None:  # so no process runs it
                job.clean(self.out)

    def renew(self, jobs: Sequence[Job]) -> None:
        """Forget what has to be done again: what could not be measured since a run diverged whose result was removed
        then; and finished runs whose models were removed, where a job that is left needs them.

        `jobs` has what a job needs before it.
        """
        for job in jobs:
            found = self.result(job)
            lost = [need for need in job.needs if found is not None and found.diverged == diverged(need)]
            if any(self.result(need) is None for need in lost):
                remove(job_folder(self.out, job) / RESULT)
        for job in reversed(jobs):
            if self.result(job) is not None:
                continue
            for need in job.needs:
                found = self.result(need)
                model = need.folder(self.out) / "model.safetensors"
                if found is not None and not found.diverged and not model.exists():
                    remove(job_folder(self.out, need) / RESULT)

    @contextmanager
    def machine(self, *, alone: bool) -> Iterator[bool]:
        """Have this machine with the study's other processes, or `alone`; False where that is not possible now."""
        path = self.out / f".machine-{slug(socket.gethostname())}"
        with path.open("a+") as file:
            yield try_lock(file, shared=not alone)

    def write_error(self, job: Job, error: Exception) -> None:
        """Note that a job failed; an error that is none of the user's keeps its traceback for a report."""
        expected = isinstance(error, UserError)
        data = {
            "format": "vitlab/1",
            "command": job.command(self.out),
            "error": str(error) if expected else f"{type(error).__name__}: {error}",
            "time": time.time(),
            "traceback": "" if expected else "".join(traceback.format_exception(error)),
        }
        write_text(job_folder(self.out, job) / ERROR, json.dumps(data, indent=1) + "\n")

    @contextmanager
    def claim(self, job: Job) -> Iterator[bool]:
        """Lock a job for this process; False where another process has it, or has finished it meanwhile."""
        try:
            lock = folder_lock(job_folder(self.out, job))
            lock.__enter__()
        except Held:
            yield False
            return
        try:
            yield self.result(job) is None
        finally:
            lock.__exit__(None, None, None)


def try_lock(file: TextIO, *, shared: bool) -> bool:
    """Whether this process has a file's lock now, until it closes it; True where the system has no locks."""
    try:
        import fcntl

        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except ImportError:
        return True
    except OSError as error:
        return error.errno not in HELD
    return True


def diverged(need: Train) -> str:
    """Why a job has no numbers whose run diverged."""
    return f"{need.name} diverged"


def check_same(out: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise UserError unless a folder's study is the one that is wanted, with as many seeds or fewer."""
    if stored.get("study") != wanted["study"]:
        raise UserError(f"{out} holds the study '{stored.get('study')}'; use another --out")
    seeds = stored.get("seeds")
    more = isinstance(seeds, int) and wanted["seeds"] >= seeds
    odd = next((key for key in wanted if stored.get(key) != wanted[key] and not (key == "seeds" and more)), None)
    if odd is not None:
        has = f"{odd} {stored.get(odd)}, not {wanted[odd]}"
        raise UserError(f"the study in {out} was begun with {has}; go on with it, or use another --out")


def plain_numbers(found: Mapping[str, float]) -> dict[str, float]:
    """Numbers as JSON has them, also of numpy; UserError for what is not finite."""
    numbers = {key: float(value) for key, value in found.items()}
    for key, value in numbers.items():
        if not math.isfinite(value):
            raise UserError(f"{key} is {value}, which is no number")
    return numbers


def describe(study: Study, request: Request) -> dict[str, Any]:
    """What must be the same in all calls that share a folder: everything but how runs are computed."""
    how = [pair for pair in request.how if pair.partition("=")[0] not in LOOSE]
    settings = sorted([*request.pairs, *how, *(f"tune_{pair}" for pair in request.tune)])
    return {
        "format": "vitlab/1",
        "study": study.name,
        "quick": request.quick,
        "data": request.data,
        "targets": list(request.targets),
        "seeds": request.seeds,
        "settings": settings,
    }
