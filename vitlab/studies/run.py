"""Run a study: every job once, by as many processes as like; the table and page after each finished row."""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM

from rich.console import Console

from vitlab.data.open import open_data
from vitlab.data.sharing import shared_sets
from vitlab.device import free_device
from vitlab.errors import Stopped, UserError
from vitlab.files import file_lock, write_text
from vitlab.signals import Interrupted, Signals, held_back, let_through, stoppable
from vitlab.studies.catalog import machine_flops
from vitlab.studies.page import render_page
from vitlab.studies.place import Place, diverged
from vitlab.studies.request import Request, slug
from vitlab.studies.study import FewShot, Job, Measure, Outcome, Row, Study, Train, in_order
from vitlab.studies.table import Table, comma_separated, make_table, markdown, shown
from vitlab.text import counted, duration
from vitlab.training.manifest import digest
from vitlab.training.recipes import operations, run_flops
from vitlab.training.recorder import Diverged

POLL = 1.0  # seconds between looks at the jobs of other processes
REDRAW = 30.0  # seconds before a figure is drawn again, which takes one or two while other processes wait
THREADS = "OMP_NUM_THREADS"  # which OpenBLAS and MKL read too, where they have no setting of their own
GRACE = 20.0  # seconds in which other processes save what they have
STOPPED = "stopped; finished rows are kept, and the same command goes on from here"


@dataclass
class Worker:
    """One process that works on a study."""

    study: Study
    request: Request
    place: Place
    rows: list[list[Row]]  # of every seed
    console: Console
    quiet: bool = False  # without the progress of each run: several processes share the terminal
    signals: Signals = field(default_factory=Signals)
    failed: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.time)

    def work(self, wanted: Sequence[Job]) -> None:
        """Run the jobs until all are done or have failed, here or in another process."""
        pending = list(wanted)
        with shared_sets():
            while pending:
                if self.signals.number:  # and its exception was lost, as one in a finalizer is
                    raise Interrupted
                pending = [job for job in pending if not self.is_over(job)]
                if pending and not any(self.try_job(job) for job in pending):
                    time.sleep(POLL)  # others have them all, or what they need

    def is_over(self, job: Job) -> bool:
        """Whether there is nothing left to do for a job: it is done, has failed since, or needs one that did."""
        if self.place.result(job) is not None:
            return True
        error = self.failed.get(job.name) or self.place.error(job, since=self.began)
        failed = (need for need in job.needs if need.name in self.failed and self.place.result(need) is None)
        lost = next((need.name for need in failed), None)
        if error is None and lost is not None:
            error = f"it needs {lost}, which failed"
        if error is not None:
            self.failed[job.name] = error
        return error is not None

    def try_job(self, job: Job) -> bool:
        """Run a job if what it needs is there and no other process has it; True if something was done."""
        if any(self.place.result(need) is None for need in job.needs):
            return False
        with self.place.machine(alone=is_timed(job)) as free, self.place.claim(job) as mine:
            if not (free and mine):
                return False
            began = time.monotonic()
            self.print(f"{job.name}: {job.command(self.place.out)}")
            try:
                outcome = self.run_job(job)
                seconds = time.monotonic() - began
                self.place.write_result(job, outcome, seconds)
            except Stopped as stop:
                raise Stopped(stop.code - 128, STOPPED) from None
            except Exception as error:
                self.place.write_error(job, error)
                self.failed[job.name] = str(error)
                self.print(f"{job.name} failed: {error}")
            else:
                numbers = ", ".join(f"{key} {shown(value, unit_of(key))}" for key, value in outcome.numbers.items())
                self.print(f"{job.name}: {numbers or outcome.diverged}; {duration(seconds)}")
            finally:
                free_device()
        if job.name in self.failed or self.completes(job):
            self.render()
        return True

    def run_job(self, job: Job) -> Outcome:
        """What a job measures; a run that diverges has no numbers, and neither has what needs its model."""
        for need in job.needs:
            if (result := self.place.result(need)) is not None and result.diverged:
                return Outcome({}, diverged=diverged(need))
        try:
            return job.run(self.place.out, Console(quiet=True) if self.quiet else self.console)
        except Diverged as error:
            return Outcome({}, diverged=str(error))

    def completes(self, job: Job) -> bool:
        """Whether a job was the last of a row."""
        rows = [row for seed in self.rows for row in seed if any(one.name == job.name for one in row.jobs)]
        return any(all(self.place.result(one) is not None for one in row.jobs) for row in rows)

    def render(self, *, draw: bool = False) -> Table:
        """Write the table and the page from all results there are, and the figure, where the last one is old or `draw`
        asks for it; one process at a time."""
        with file_lock(str(self.place.out / ".render")):
            table = make_table(self.study, self.request, self.place, self.rows)
            out = self.place.out
            write_text(out / "table.csv", comma_separated(table))
            write_text(out / "table.md", markdown(table))
            picture = out / "figure.png"
            recent = picture.exists() and time.time() - picture.stat().st_mtime < REDRAW
            found = picture if recent and not draw else self.draw(table)
            write_text(out / "study.html", render_page(table, found))
        return table

    def draw(self, table: Table) -> Path | None:
        """Write the figure of what is there; None where there is nothing yet, no matplotlib, or a figure that fails:
        none is worth the end of the work."""
        from vitlab.plots.style import drawing, write

        if not table.done:
            return None
        try:
            with drawing():
                figure = table.study.figure(table)
            return write(figure, table.out / "figure", ("png", "svg"))[0]
        except UserError:  # figures are an extra, and some need more than a first number
            return None
        except Exception as error:
            self.print(f"there is no figure: {type(error).__name__}: {error}")
            return None

    def print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def unit_of(key: str) -> str:
    return "%" if key.startswith("accuracy") or key == "std" else ""


# ---- the command


def all_rows(study: Study, request: Request) -> list[list[Row]]:
    """The rows of every seed."""
    return [list(study.rows(request, seed)) for seed in range(request.seeds)]


def choose_rows(study: Study, rows: list[list[Row]], only: Iterable[str]) -> list[list[Row]]:
    """The rows with these names, in which Ti/16 may be Ti16 as in a folder's name; without names, all."""
    names, chosen = {slug(row.name): row.name for row in rows[0]}, list(only)
    for name in chosen:
        if slug(name) not in names:
            raise UserError(f"the study '{study.name}' has no row '{name}'; its rows are {', '.join(names.values())}")
    wanted = {slug(name) for name in chosen}
    return [[row for row in seed if not wanted or slug(row.name) in wanted] for seed in rows]


def run_study(
    study: Study,
    request: Request,
    out: Path,
    *,
    only: Iterable[str] = (),
    jobs: int = 1,
    console: Console | None = None,
) -> tuple[Table, dict[str, str]]:
    """Run a study in the folder `out`, or go on with it; returns the table and the jobs that failed, with why.

    `only` names the rows to run; the table shows all. `jobs` processes work at once, on one device; what is timed is
    done by one when they are through.
    """
    request = request.shared(jobs)
    rows, names, place = all_rows(study, request), tuple(only), Place(out)
    chosen = choose_rows(study, rows, names)
    wanted = in_order(job for seed in chosen for row in seed for job in row.jobs)
    for run in (row.trained for row in rows[0] if row.trained is not None):
        run_flops(run.settings())  # the table has all rows, so settings that one cannot have are an error now
    place.open(study, request, check_jobs([job for job in wanted if place.result(job) is None]))
    place.renew(wanted)
    place.clean(wanted)
    worker = Worker(study, request, place, rows, console or Console(), quiet=jobs > 1)
    left = [job for job in wanted if place.result(job) is None]
    worker.print(describe_work(chosen[0], request, wanted, left))
    with stoppable(STOPPED) as worker.signals:
        worker.render(draw=True)
        if jobs > 1 and any(not is_timed(job) for job in left):
            run_processes(jobs, study, request, out, names, worker.began)
        worker.work(wanted)  # all of it, or what is timed and what processes that were killed have left
        table = worker.render(draw=True)
    names_left = {job.name for job in wanted if place.result(job) is None}  # another process may have had more luck
    return table, {name: why for name, why in worker.failed.items() if name in names_left}


def check_jobs(jobs: Sequence[Job]) -> dict[str, str]:
    """The digests of the data that jobs use, by name; UserError, before the first job, for settings that none of them
    can start with and for missing data."""
    training_flops(jobs)
    found = {}
    for name in data_names(jobs):
        data = open_data(name)
        if data.is_multi_label:
            raise UserError(
                f"{name} has images of several labels, and studies measure accuracy; name a set of single ones"
            )
        found[name] = digest(data)
    return found


def data_names(jobs: Sequence[Job]) -> list[str]:
    """The data sets that jobs train and test on."""
    names = [job.settings().data for job in jobs if isinstance(job, Train)]
    return list(dict.fromkeys([*names, *(job.data for job in jobs if isinstance(job, FewShot))]))


def training_flops(jobs: Sequence[Job]) -> float:
    """The operations of all runs; UserError for settings of which no model can be made."""
    return sum(job.flops for job in jobs if isinstance(job, Train))


def describe_work(rows: Sequence[Row], request: Request, jobs: Sequence[Job], left: Sequence[Job]) -> str:
    """One line on what there is to do."""
    done, flops = len(jobs) - len(left), training_flops(left)
    line = f"{counted(len(rows), 'row')}, {counted(request.seeds, 'seed')}: {counted(len(jobs), 'job')}, {done} done"
    if not flops:
        return line
    took = duration(flops / machine_flops(request.device))
    return f"{line}; {operations(flops)} of training left, about {took} on this machine, beside starting and testing"


def run_processes(count: int, study: Study, request: Request, out: Path, only: tuple[str, ...], began: float) -> None:
    """Wait for processes that do all work: numpy has its threads from the start, and this one those of a machine."""
    context = multiprocessing.get_context("spawn")  # a fork would share a GPU's context
    found = [context.Process(target=work_beside, args=(study, request, out, only, began)) for _ in range(count)]
    with share_of_threads(count), held_back():
        for process in found:
            process.start()
    try:
        for process in found:
            process.join()
    except BaseException as error:
        # Ctrl-C and most that end a job signal all its processes, and after a second signal a run saves nothing
        signaled = isinstance(error, Stopped | KeyboardInterrupt)
        until = time.monotonic() + (GRACE if signaled else 0)
        try:
            for process in found:
                process.join(max(0.0, until - time.monotonic()))
        finally:
            for process in found:
                process.terminate()
        raise
    finally:
        for process in found:
            process.join()


@contextmanager
def share_of_threads(processes: int) -> Iterator[None]:
    """Within this, new processes use their share of the cores for linear algebra, unless the user has set it: threads
    of a product wait for the last one, and where there are more than cores that takes ten times as long."""
    if os.environ.get(THREADS):
        yield
        return
    os.environ[THREADS] = str(max(1, (os.cpu_count() or 1) // processes))
    try:
        yield
    finally:
        del os.environ[THREADS]


def is_timed(job: Job) -> bool:
    return isinstance(job, Measure) and job.timed


def work_beside(study: Study, request: Request, out: Path, only: tuple[str, ...], began: float) -> None:
    """What a process of `run_processes` does; errors of jobs are in the folder."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    rows = all_rows(study, request)
    wanted = in_order(job for seed in choose_rows(study, rows, only) for row in seed for job in row.jobs)
    try:
        with stoppable("stopped") as signals:
            let_through()
            place, console = Place(out), Console()
            worker = Worker(study, request, place, rows, console, quiet=True, signals=signals, began=began)
            worker.work([job for job in wanted if not is_timed(job)])
    except Stopped as stop:
        raise SystemExit(stop.code) from None


def end_with_parent() -> None:
    """Stop this process, with what it has saved, when the one that started it was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), SIGTERM)
        time.sleep(GRACE)
        os._exit(1)
