"""All studies, by name, and what each costs."""

import difflib
import time

import torch

from vitlab.device import peak_flops, pick_device
from vitlab.errors import UserError
from vitlab.studies import (
    axial,
    bias,
    compute,
    data,
    head,
    heads,
    masked,
    optimizer,
    positions,
    regularization,
    resolution,
    shape,
    speed,
)
from vitlab.studies.request import Request
from vitlab.studies.study import Study, Train, in_order

ORDER = (
    *(data, compute, positions, shape, head, optimizer, axial),
    *(resolution, masked, regularization, speed, heads, bias),
)
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in ORDER}
SMALL_SHARE = 0.1  # of a GPU's peak, that the small models of a study reach
CPU_SHARE = 0.5  # of the speed of a large product, that training on a CPU reaches


def find_study(name: str) -> Study:
    """A study by name; UserError names the nearest to an unknown one."""
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, 1, 0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(STUDIES)}"
        raise UserError(f"there is no study '{name}'; {hint}")
    return STUDIES[name]


def count_runs(study: Study, request: Request) -> tuple[int, float]:
    """The number of training runs of a study and all their operations."""
    rows = [row for seed in range(request.seeds) for row in study.rows(request, seed)]
    runs = [job for job in in_order(job for row in rows for job in row.jobs) if isinstance(job, Train)]
    return len(runs), sum(run.flops for run in runs)


def machine_flops(device: str = "auto") -> float:
    """About how many operations a second training reaches here: by the table of GPUs, elsewhere measured."""
    where = pick_device(device)
    peak = peak_flops(where)
    if peak is not None:
        return SMALL_SHARE * peak
    side = 512 if where.type == "cpu" else 2048
    a, times = torch.ones(side, side, device=where), []
    for _ in range(4):
        began = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - began)
    return CPU_SHARE * 2 * side**3 / min(times[1:])
