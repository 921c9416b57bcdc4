"""`vitlab export`: load, write beside the target, check on pictures what was written, and only then put it in place."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from vitlab.errors import UserError
from vitlab.export import onnx
from vitlab.export.compare import AT_ONCE, BATCHES, LIMITS, Check, Runner, compare, onnx_runner, status, torch_runner
from vitlab.export.graph import Half, any_size, plain
from vitlab.export.images import open_pictures
from vitlab.export.int8 import Outcome, Wanted, write_int8
from vitlab.files import atomic_path
from vitlab.models.variants import Model
from vitlab.weights import load

Precision = Literal["fp32", "fp16", "int8"]


@dataclass(frozen=True)
class Report:
    """What was written and how it was found; `int8` where layers were quantized."""

    path: Path
    bytes: int
    checks: tuple[Check, ...]
    int8: Outcome | None = None

    def lines(self) -> list[str]:
        """The report in words."""
        said = [f"{self.path} is written: {megabytes(self.bytes)}"]
        which = "the file's" if self.int8 is None else "the float file's"
        said += [
            f"largest difference between {which} logits and the model's: {check.difference:.2g} "
            f"({check.images} images of {check.title} at {check.size[0]}x{check.size[1]}, "
            f"in batches of {' and '.join(map(str, BATCHES))})"
            for check in self.checks
        ]
        return said if self.int8 is None else said + int8_lines(self.int8, self.bytes)


def export(
    run: str | Path,
    target: str | Path,
    *,
    dynamic_size: bool = False,
    precision: Precision = "fp32",
    check: str | None = None,
    calibrate: str | None = None,
    least: float = 0.95,
) -> Report:
    """Write a model to `target`, an .onnx or .pt2 file that must not exist, whole or not at all.

    >>> export("runs/mine", "mine.onnx")
    >>> export("runs/mine", "mine.onnx", precision="int8", calibrate="photos")

    The batch may be of any size, with `dynamic_size` the images too. The logits of the file are compared with the
    model's on the pictures `check` names (else those of `calibrate`, else generated ones). int8 takes its scales from
    the pictures of `calibrate` and must give the same best class for the share `least` of them.
    """
    target = Path(target)
    check_request(target, precision, calibrate, least)
    model = load(run).float()
    pictures = open_pictures(check or calibrate)
    with atomic_path(target, folder=False) as place, onnx.weights_beside(target) as other:
        if precision == "int8":
            wanted = Wanted(model, dynamic_size, open_pictures(calibrate), pictures if check else None, least)
            found = write_int8(wanted, place, other)
            return Report(target, onnx.size_of(place, other), found.checks, found)
        module = build(model, dynamic_size, precision, fused=target.suffix == ".pt2")
        with status("exporting"):
            if target.suffix == ".pt2":
                runner = write_program(module, model, dynamic_size, place)
            else:
                onnx.save(onnx.to_proto(module, model, dynamic_size), place, other)
                runner = onnx_runner(place)
        checks = compare(runner, model, pictures, dynamic_size, LIMITS[precision])
        return Report(target, onnx.size_of(place, other), checks)


def int8_lines(found: Outcome, size: int) -> list[str]:
    floats = ", ".join(found.floats) or "none"
    before, after = (f"{1000 * seconds:.3g} ms" for seconds in found.seconds)
    where = "" if found.apart else ", those it was calibrated on among them"
    return [
        f"int8: {found.layers - len(found.floats)} of {found.layers} dense layers; left float: {floats}",
        f"agreement with float: {found.agreement:.2%} of {found.images} images of {found.title}{where}; "
        f"largest difference of a logit {found.difference:.2g}",
        f"size: {megabytes(size)} against {megabytes(found.float_bytes)}, {found.float_bytes / size:.1f} times smaller",
        f"speed: {after} an image against {before}, {found.seconds[0] / found.seconds[1]:.2f} times as fast "
        f"(this processor, threads: {torch.get_num_threads()}, batches of {AT_ONCE})",
    ]


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.3g} MB" if size < 1e9 else f"{size / 1e9:,.3g} GB"


def check_request(target: Path, precision: Precision, calibrate: str | None, least: float) -> None:
    if target.suffix not in (".onnx", ".pt2"):
        raise UserError(f"'{target}' should end in .onnx, or in .pt2 for torch.export")
    if target.suffix == ".onnx":
        onnx.need_packages()
    elif precision == "int8":
        raise UserError("int8 is written to .onnx files only; name one, or leave --int8 out")
    if precision == "int8" and calibrate is None:
        raise UserError("int8 needs pictures like those the model will see: add --calibrate FOLDER")
    if precision != "int8" and calibrate is not None:
        raise UserError("--calibrate goes with --int8; to compare on your own pictures use --check")
    if not 0 < least <= 1:
        raise UserError(f"the least agreement must be above 0 and at most 1, not {least:g}")


def build(model: Model, dynamic_size: bool, precision: Precision, *, fused: bool) -> nn.Module:
    simple = plain(model, fused=fused)
    module = any_size(simple) if dynamic_size else simple
    return Half(module) if precision == "fp16" else module


# ---- torch.export


def write_program(module: nn.Module, model: Model, dynamic_size: bool, place: Path) -> Runner:
    images, shapes = onnx.example(model, dynamic_size)
    with onnx.quiet(), torch.no_grad():
        program = torch.export.export(module, (images,), dynamic_shapes=(shapes,))
        facts = json.dumps(onnx.metadata(model, dynamic_size), indent=2)
        torch.export.save(program, place, extra_files={"vitlab.json": facts})
        return torch_runner(torch.export.load(place).module())
