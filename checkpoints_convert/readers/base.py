"""What a reader gives to the engine. Readers know one format each, and no jax."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from checkpoints_convert.names import Dialect
from checkpoints_convert.readers.files import SourceFile
from jaxspec.model.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class SourceTensor:
    """One tensor of a source. ``read`` loads it in ``shape``, exactly the stored values.

    ``dtype`` is that of what ``read`` gives: float32 or bfloat16 for weights; integers and booleans as they are.
    """

    encoding: str  # as the format calls it: "BF16", "Q4_1", ...
    dtype: np.dtype
    shape: tuple[int, ...]
    where: str  # file name, for messages
    read: Callable[[], np.ndarray]
    place: tuple[str, int]  # file name and first byte: read in this order, files are gone through forward


class Source(Protocol):
    """A checkpoint in a foreign format, opened and found whole; no tensor is loaded yet."""

    @property
    def dialect(self) -> Dialect: ...

    @property
    def config(self) -> LlamaConfig: ...

    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...

    @property
    def files(self) -> Mapping[str, SourceFile]:
        """Every file whose content went into the conversion, by name."""
        ...

    def write_tokenizer(self, dst: Path) -> bool:
        """Puts tokenizer.json and its companions into the empty folder ``dst``. False when the source has none."""
        ...
