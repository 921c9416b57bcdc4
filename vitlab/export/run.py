"""`vitlab export`: load, write to a temporary file, compare it with the model on images, then rename it."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from vitlab.errors import UserError
from vitlab.export.compare import Comparison, compare
from vitlab.export.images import open_images
from vitlab.export.int8 import Int8Request, Int8Result, megabytes, write_int8
from vitlab.inference import onnx_file as onnx
from vitlab.inference.traced import export_module
from vitlab.models.unknown import NOT_HELD
from vitlab.models.variants import Model
from vitlab.weights import load

Precision = Literal["fp32", "fp16", "int8"]
log = logging.getLogger("vitlab")


@dataclass(frozen=True)
class ExportResult:
    """The file that was written and how it compares with the model; `int8` where layers were quantized."""

    path: Path
    bytes: int
    comparisons: tuple[Comparison, ...]
    int8: Int8Result | None = None

    def lines(self) -> list[str]:
        """The result as lines to print."""
        file = "the file" if self.int8 is None else "the float file"
        return [
            f"{self.path} is written: {megabytes(self.bytes)}",
            *(each.line(file) for each in self.comparisons),
            *(self.int8.lines(self.bytes) if self.int8 else []),
        ]


def export(
    run: str | Path,
    target: str | Path,
    *,
    dynamic_size: bool = False,
    precision: Precision = "fp32",
    check: str | None = None,
    calibrate: str | None = None,
    least: float = 0.95,
) -> ExportResult:
    """Write a model to `target`, an .onnx or .pt2 file that must not exist, complete or not at all.

    >>> export("runs/mine", "mine.onnx")
    >>> export("runs/mine", "mine.onnx", precision="int8", calibrate="photos")

    The batch may be of any size, with `dynamic_size` the images too. The logits of the file are compared with the
    model's on the images `check` names (else those of `calibrate`, else generated ones). int8 takes its scales from
    the images of `calibrate` and must give the same best class for the share `least` of them. Raises UserError if the
    request is not possible or the file does not compute what the model does.
    """
    target = Path(target)
    check_request(target, precision, calibrate, least)
    model = load(run).float()
    images = open_images(check or calibrate)
    if model.card.unknown is not None:
        log.info(NOT_HELD, target)
    with onnx.new_file(target) as file:
        if precision == "int8":
            request = Int8Request(model, dynamic_size, open_images(calibrate), images if check else None, least)
            int8 = write_int8(request, file)
            return ExportResult(target, file.bytes, int8.comparisons, int8)
        module = export_module(model, dynamic_size, half=precision == "fp16")
        if target.suffix == ".pt2":
            runner = write_pt2(module, model, dynamic_size, file.path)
        else:
            file.save(onnx.to_proto(module, model, dynamic_size))
            runner = file.runner()
        return ExportResult(target, file.bytes, compare(runner, model, images, dynamic_size, precision))


def check_request(target: Path, precision: Precision, calibrate: str | None, least: float) -> None:
    if target.suffix not in (".onnx", ".pt2"):
        raise UserError(f"'{target}' should end in .onnx, or in .pt2 for torch.export")
    if target.suffix == ".onnx":
        onnx.check_packages()
    elif precision == "int8":
        raise UserError("int8 is written to .onnx files only; name one, or leave --int8 out")
    if precision == "int8" and calibrate is None:
        raise UserError("int8 needs images like those the model will see: add --calibrate FOLDER")
    if precision != "int8" and calibrate is not None:
        raise UserError("--calibrate goes with --int8; to compare on your own images use --check")
    if not 0 < least <= 1:
        raise UserError(f"the least agreement must be above 0 and at most 1, not {least:g}")


def write_pt2(module: nn.Module, model: Model, dynamic_size: bool, path: Path) -> onnx.Runner:
    """Write a module by torch.export; returns the file, loaded again."""
    images, shapes = onnx.example_input(model, dynamic_size)
    with onnx.exporting():
        program = torch.export.export(module, (images,), dynamic_shapes=(shapes,))
        metadata = json.dumps(onnx.metadata(model, dynamic_size), indent=2)
        torch.export.save(program, path, extra_files={"vitlab.json": metadata})
        return torch.export.load(path).module()
