"""``manifest.json``: where a checkpoint comes from, and what is stored for every tensor."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from jaxspec.errors import UserError
from jaxspec.model.config import checked_fields
from jaxspec.model.params import ParamSpec

FORMAT_VERSION: Final = 2
MANIFEST: Final = "manifest.json"
# Beside a draft or heads, where there is one: the ids that they may say, most frequent first.
DRAFT_VOCAB: Final = "draft_vocab.json"
STORED_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
}
# An int8 tensor goes with one float32 scale per output channel, stored beside it under its name and this ending.
SCALE: Final = "_scale"


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """What the manifest knows of one stored tensor; ``sha256`` is over its little-endian C-order bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORED_DTYPES[self.dtype].itemsize

    @classmethod
    def of(cls, array: np.ndarray) -> "TensorRecord":
        """The record of an array that is about to be stored."""
        return cls(array.dtype.name, array.shape, tensor_sha256(array))

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> "TensorRecord":
        """Reads what ``dataclasses.asdict`` made. Raises UserError naming what is wrong in ``where``."""
        record = cls(**checked_fields(cls, data, where))
        if record.dtype not in STORED_DTYPES:
            raise UserError(f"{where}: expected dtype {' or '.join(STORED_DTYPES)}, got {record.dtype!r}")
        if not isinstance(record.shape, list) or not all(type(size) is int and size >= 0 for size in record.shape):
            raise UserError(f"{where}: expected a shape of sizes, got {record.shape!r}")
        return dataclasses.replace(record, shape=tuple(record.shape))


@dataclasses.dataclass(frozen=True)
class QuantizationError:
    """How far a quantised tensor is from what it was made of."""

    max_abs: float
    relative_rms: float  # root mean square of the error over that of the values


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Where a checkpoint comes from and what it holds."""

    format_version: int
    source_format: str
    sources: dict[str, str]  # file name -> sha256
    family: str
    model_version: str
    dtype: str  # that of every parameter, or "mixed"
    parameter_count: int
    tokenizer_fingerprint: str | None
    tokenizer_size: int | None
    tensors: dict[str, TensorRecord]
    shared: tuple[str, ...] = ()  # parameters of a draft that are not here but its target's own
    layout: dict[str, int] | None = None  # mesh whose devices each find their own pieces in files of their own
    quantization_errors: dict[str, QuantizationError] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping that :meth:`from_json` takes back unchanged."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> "Manifest":
        """Reads :meth:`to_json`'s mapping. Another format version, unknown or missing keys raise UserError."""
        if isinstance(data, Mapping) and data.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
            raise UserError(f"{where}: expected format version {FORMAT_VERSION}, got {data['format_version']!r}")
        values = checked_fields(cls, data, where)
        for key in ("tensors", "sources", "quantization_errors"):
            if not isinstance(values.setdefault(key, {}), Mapping):
                raise UserError(f"{where}: {key}: expected a JSON object, got {type(values[key]).__name__}")
        tensors = {
            name: TensorRecord.from_json(entry, f"{where}: tensors.{name}") for name, entry in values["tensors"].items()
        }
        errors = {
            name: QuantizationError(**checked_fields(QuantizationError, entry, f"{where}: quantization_errors.{name}"))
            for name, entry in values["quantization_errors"].items()
        }
        shared = values.get("shared", [])
        if not isinstance(shared, list | tuple) or not all(isinstance(name, str) for name in shared):
            raise UserError(f"{where}: shared: expected a list of parameters, got {shared!r}")
        made = {"tensors": tensors, "quantization_errors": errors, "shared": tuple(shared)}
        return cls(**{**values, **made})


def group_and_leaf(name: str) -> tuple[str, str]:
    """The Orbax item that holds a tensor, and the tensor's key inside it.

    >>> group_and_leaf("layers.3.qkv"), group_and_leaf("lm_head"), group_and_leaf("lm_head_scale")
    (('layers.3', 'qkv'), ('lm_head', 'lm_head'), ('lm_head', 'lm_head_scale'))
    """
    group, _, leaf = name.rpartition(".")
    return group or leaf.removesuffix(SCALE), leaf


def grouped(names: Mapping[str, Any] | Sequence[str]) -> dict[str, list[str]]:
    """Tensor names by group; groups and names keep the order in which they come."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_and_leaf(name)[0], []).append(name)
    return groups


def contradictions(specs: Mapping[str, ParamSpec], tensors: Mapping[str, TensorRecord]) -> list[str]:
    """Where the manifest's tensors are not those of a model with these parameters, one line each."""
    expected = {name: spec.shape for name, spec in specs.items()}
    for name, spec in specs.items():
        if name in tensors and tensors[name].dtype == "int8":
            expected[name + SCALE] = spec.shape[: len(spec.shape) - spec.n_in]
    problems = [f"the manifest lacks {name}" for name in expected if name not in tensors]
    problems += [f"the manifest names {name}, which the model has not" for name in tensors if name not in expected]
    problems += [
        f"{name}: config.json implies shape {list(expected[name])}, the manifest says {list(record.shape)}"
        for name, record in tensors.items()
        if name in expected and expected[name] != record.shape
    ]
    return problems


def tensor_sha256(array: np.ndarray) -> str:
    """sha256 of the little-endian bytes of an array in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()
