"""What a reader gives to the engine. Readers know one format each, and no jax."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from checkpoints_convert.names import Dialect
from jaxspec.model.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class SourceTensor:
    """One tensor of a source. ``read`` loads it: float32 or bfloat16, in ``shape``, exactly the stored values."""

    encoding: str  # as the format calls it: "BF16", "Q4_1", ...
    bfloat16: bool  # whether read() gives bfloat16; float32 otherwise
    shape: tuple[int, ...]
    where: str  # file name, for messages
    read: Callable[[], np.ndarray]


class Source(Protocol):
    """A checkpoint in a foreign format, opened and found whole; no tensor is loaded yet."""

    @property
    def dialect(self) -> Dialect: ...

    @property
    def config(self) -> LlamaConfig: ...

    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...

    @property
    def files(self) -> Mapping[str, Path]:
        """Every file whose content went into the conversion, by name."""
        ...

    def write_tokenizer(self, dst: Path) -> bool:
        """Puts tokenizer.json and its companions into the empty folder ``dst``. False when the source has none."""
        ...
