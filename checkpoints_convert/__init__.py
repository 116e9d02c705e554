"""Brings checkpoints of other formats into jaxspec's own: ``jaxspec-convert``, or :func:`convert`."""

from checkpoints_convert.convert import Result, convert
from checkpoints_convert.findings import ConversionError

__all__ = ["ConversionError", "Result", "convert"]
