"""Brings checkpoints of other formats into jaxspec's own and out again: ``jaxspec-convert``, or functions."""

from checkpoints_convert.convert import Result, convert
from checkpoints_convert.export.hf import Exported, to_hf
from checkpoints_convert.findings import ConversionError

__all__ = ["ConversionError", "Exported", "Result", "convert", "to_hf"]
