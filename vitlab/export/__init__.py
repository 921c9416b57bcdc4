"""Models as files for other programs: ONNX, in float32, half precision or int8, or torch.export.

A file is renamed to its place only after its own runtime has computed on images what the model computes.
"""

from vitlab.export.run import ExportResult, export

__all__ = ["ExportResult", "export"]
