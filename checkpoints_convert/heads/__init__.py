"""Speculative heads: from the formats of their authors and of other servers, and back."""

from checkpoints_convert.heads.convert import HeadsResult, convert_heads

__all__ = ["HeadsResult", "convert_heads"]
