"""The studies at laboratory size on one GPU: python benchmarks/studies.py OUT [--jobs N] [--seconds S] [STAGE ...]

Run where the folders tiny-imagenet, pets and flowers are. A stage is STUDY:SEEDS, or STUDY:SEEDS:ROW,ROW for some of
its rows. One pool of processes works on all stages, so that none waits for the last run of a study while there is
another: each takes the first job of the list that can start and that no other process has. What measures times is done
before, by one process. After S seconds all stop; the same command goes on. Each study is in OUT/STUDY as `vitlab
study` has it, which draws its table and its page; OUT/studies.tgz has the results without the models, for another
machine, and --results names such a file to go on from.
"""

import argparse
import multiprocessing
import os
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from vitlab.data.sharing import shared_sets
from vitlab.errors import Stopped
from vitlab.signals import stoppable
from vitlab.studies.catalog import find_study
from vitlab.studies.place import ABOUT, ERROR, RESULT, SETS, Place
from vitlab.studies.request import make_request
from vitlab.studies.run import POLL, Worker, all_rows, check_jobs, choose_rows, data_names, end_with_parent, is_timed
from vitlab.studies.study import JOBS, Job, in_order
from vitlab.studies.table import Table

DATA = ("data=tiny-imagenet", "targets=pets,flowers")
SHORT = ("steps=1000", "tune_steps=250")
MUON = ("optimizer=muon", "lr=0.003")
SETTINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("data", "compute", "masked", "resolution"), (*DATA, *SHORT, *MUON)),
    **dict.fromkeys(("positions", "shape", "axial", "regularization", "heads", "bias"), (*DATA, SHORT[0], *MUON)),
    "head": (*DATA, SHORT[0], MUON[0]),
    "optimizer": (*DATA, *SHORT),
    "speed": (),
}
# The largest runs first, beside small ones that need few images; more seeds at the end.
STAGES = (
    *("speed:1", "compute:1:B/8,R101x2,R50x2,R50+B/16,S/8", "data:1", "compute:1", "positions:3", "optimizer:2"),
    *("head:2", "shape:1", "masked:2", "resolution:3", "bias:3", "axial:3", "heads:3", "regularization:3"),
    *("data:3", "shape:3", "compute:2", "head:3", "masked:3", "optimizer:3", "compute:3"),
)
PACK = 60.0  # seconds between looks at what there is
GRACE = 25.0  # seconds in which a process saves its run
KEPT = (RESULT, ERROR, ".npy", ".npz")


class Quiet(Worker):
    """A worker that draws nothing: that takes a second, and is done at the end."""

    def render(self, *, draw: bool = False) -> Table:
        return Table(self.study, self.request, self.place.out)


@dataclass(frozen=True)
class Plan:
    """What is to be done: the stages, by so many processes."""

    stages: Sequence[str]
    out: Path
    jobs: int
    quick: bool

    def open(self) -> None:
        """Begin or continue every study with all its seeds, check its data, and forget what has to be done again."""
        seeds: dict[str, int] = {}
        left: dict[str, list[Job]] = {}
        for stage in self.stages:
            worker, wanted = self.stage(stage)
            name = worker.study.name
            seeds[name] = max(seeds.get(name, 0), worker.request.seeds)
            left.setdefault(name, []).extend(job for job in wanted if worker.place.result(job) is None)
        digests = check_jobs([job for jobs in left.values() for job in jobs])  # of each set once
        for name, count in seeds.items():
            worker, _ = self.stage(f"{name}:{count}")
            worker.place.open(worker.study, worker.request, {each: digests[each] for each in data_names(left[name])})
        for stage in self.stages:
            worker, wanted = self.stage(stage)
            worker.place.renew(wanted)

    def stage(self, stage: str) -> tuple[Worker, list[Job]]:
        name, seeds, *names = stage.split(":")
        study, place = find_study(name), Place(self.out / name)
        pairs = ("device=cpu",) if self.quick else SETTINGS[name]
        request = make_request(study, [*pairs, f"seeds={seeds}"], quick=self.quick).shared(self.jobs)
        rows = all_rows(study, request)
        chosen = choose_rows(study, rows, names[0].split(",") if names else ())
        worker = Quiet(study, request, place, rows, Console(width=200), quiet=True)
        return worker, in_order(job for seed in chosen for row in seed for job in row.jobs)

    def work(self, timed: bool) -> None:
        """What a process does: jobs from the first on, until all are done or have failed, here or in another one."""
        threading.Thread(target=end_with_parent, daemon=True).start()
        if timed:
            os.environ.pop("CUDA_MPS_PIPE_DIRECTORY", None)  # all of the GPU, not by the service that shares it
        listed = [(worker, job) for worker, jobs in map(self.stage, self.stages) for job in jobs]
        queue = [(worker, job) for worker, job in listed if is_timed(job) == timed]
        try:
            with stoppable("stopped"), shared_sets():
                while queue:
                    queue = [(worker, job) for worker, job in queue if not worker.is_over(job)]
                    if queue and not any(worker.try_job(job) for worker, job in queue):
                        time.sleep(POLL)  # others have them all, or what they need
        except Stopped as stop:
            raise SystemExit(stop.code) from None

    def run(self, until: float) -> None:
        """Let processes do everything, or what they can until a time of `time.monotonic`."""
        context = multiprocessing.get_context("spawn")
        for count, timed in ((1, True), (self.jobs, False)):
            pool = [context.Process(target=self.work, args=(timed,)) for _ in range(count)]
            for process in pool:
                process.start()
            looked = time.monotonic()
            while any(process.is_alive() for process in pool) and time.monotonic() < until:
                time.sleep(POLL)
                if time.monotonic() > looked + PACK:
                    looked = time.monotonic()
                    print(self.pack(), flush=True)
            for process in pool:
                process.terminate()
            for process in pool:
                process.join(GRACE)
                process.kill()
            print(self.pack(), flush=True)

    def pack(self) -> str:
        """Write studies.tgz; return how many jobs of each study are done."""
        part, done = self.out / "studies.part", Counter[str]()
        with tarfile.open(part, "w:gz") as archive:
            for path in [*self.out.glob(f"*/{ABOUT}"), *self.out.glob(f"*/{SETS}"), *self.out.glob(f"*/{JOBS}/*/*")]:
                if path.name in (ABOUT, SETS) or path.name.endswith(KEPT):
                    archive.add(path, name := path.relative_to(self.out))
                    done[name.parts[0]] += path.name == RESULT
        part.replace(self.out / "studies.tgz")
        return time.strftime("%H:%M:%S ") + ", ".join(f"{name} {count}" for name, count in sorted(done.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("stages", nargs="*", default=STAGES)
    parser.add_argument("--jobs", type=int, default=14, help="processes")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which to stop")
    parser.add_argument("--results", type=Path, help="a studies.tgz to go on from")
    parser.add_argument("--quick", action="store_true", help="tiny runs on built-in data, on a CPU, to try this script")
    asked = parser.parse_intermixed_args()
    until = time.monotonic() + asked.seconds
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.results:
        with tarfile.open(asked.results) as archive:
            archive.extractall(asked.out, filter="data")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small products on a busy machine
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    plan = Plan(asked.stages, asked.out, asked.jobs, asked.quick)
    plan.open()
    plan.run(until)


if __name__ == "__main__":
    main()
