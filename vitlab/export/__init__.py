"""A model as one file for other programs: ONNX, in float32, half precision or int8, or torch's own export.

A file appears only after the runtime that will run it has computed on pictures what the model computes.
"""

from vitlab.export.run import Report, export

__all__ = ["Report", "export"]
