"""The report of a finished run: one HTML page to read, print and share."""

from vitlab.report.make import Report, write_report

__all__ = ["Report", "write_report"]
