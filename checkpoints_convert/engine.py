"""The exactly-once engine: every source tensor is consumed or on a named ignore list, every leaf is filled.

A plan is made from the directory alone and lists all failures before anything is read; then leaves are filled group by
group, in the order of the source's files, one source tensor in memory at a time.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints_convert.findings import Findings
from checkpoints_convert.names import Slot, embed_name, head_name, ignored, place, slots
from checkpoints_convert.readers import Source, SourceTensor
from jaxspec.checkpoint import QuantizationError, tensor_sha256
from jaxspec.checkpoint.int8 import quantize
from jaxspec.checkpoint.manifest import SCALE, grouped
from jaxspec.model.config import LlamaConfig
from jaxspec.model.params import ParamSpec, param_specs

Dtype = Literal["keep", "float32", "bfloat16"]
DTYPES: Final = ("keep", "float32", "bfloat16")

_FLOAT32, _BFLOAT16, _INT8 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int8)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter to be stored, and the source tensors that fill it."""

    name: str
    spec: ParamSpec
    dtype: np.dtype  # that it is filled in
    int8: bool  # whether it is then stored as int8 with scales
    slots: tuple[Slot, ...]

    @property
    def stored(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """dtype and shape of what is stored for it, by tensor name."""
        if not self.int8:
            return {self.name: (self.dtype, self.spec.shape)}
        scales = self.spec.shape[: len(self.spec.shape) - self.spec.n_in]
        return {self.name: (_INT8, self.spec.shape), self.name + SCALE: (_FLOAT32, scales)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every leaf of the model, checked against the source."""

    source: Source
    leaves: dict[str, Leaf]

    @property
    def config(self) -> LlamaConfig:
        return self.source.config

    @property
    def stored(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """dtype and shape of every tensor that will be stored, in checkpoint order."""
        return {name: what for leaf in self.leaves.values() for name, what in leaf.stored.items()}

    @property
    def nbytes(self) -> int:
        return sum(nbytes(*what) for what in self.stored.values())

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(leaf.spec.shape) for leaf in self.leaves.values())

    def groups(self) -> dict[str, list[str]]:
        """Names of leaves by group; groups in the order in which their first bytes come in the source's files."""

        def first(names: list[str]) -> tuple[str, int]:
            slots = (slot for name in names for slot in self.leaves[name].slots)
            return min(self.source.tensors[slot.source].place for slot in slots)

        return dict(sorted(grouped(self.leaves).items(), key=lambda item: first(item[1])))

    def fill(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads the source tensors of some leaves, forward, one in memory at a time, and puts them together."""
        arrays: dict[str, np.ndarray] = {}
        slots = [(slot, self.leaves[name]) for name in names for slot in self.leaves[name].slots]
        for slot, leaf in sorted(slots, key=lambda pair: self.source.tensors[pair[0].source].place):
            tensor = self.source.tensors[slot.source].read()
            if slot.part.whole and tensor.dtype == leaf.dtype:
                arrays[leaf.name] = tensor.reshape(leaf.spec.shape)
                continue
            if leaf.name not in arrays:
                arrays[leaf.name] = np.empty(leaf.spec.shape, leaf.dtype)
            place(tensor, arrays[leaf.name], slot, self.source.config, self.source.dialect)
        return {name: arrays[name] for name in names}


def nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of an array."""
    return math.prod(shape) * dtype.itemsize


def make_plan(source: Source, dtype: Dtype, *, int8: bool = False) -> Plan:
    """Maps every source tensor to its place. ``int8``: the matrices will be stored so.

    Raises ConversionError with one finding per tensor that has no place, is missing, or has another shape than the
    config implies.
    """
    config, tensors = source.config, source.tensors
    findings = Findings()
    if config.num_layers > len(tensors):
        # Also keeps an absurd layer count from being enumerated.
        findings.add(f"the config says {config.num_layers} layers, the source has only {len(tensors)} tensors")
        findings.raise_if_any()
    by_leaf: dict[str, list[Slot]] = {}
    consumed: set[str] = set()
    for slot in slots(config, source.dialect):
        by_leaf.setdefault(slot.leaf, []).append(slot)
        consumed.add(slot.source)
        tensor = tensors.get(slot.source)
        if tensor is None:
            findings.add(f"{slot.source} is missing: expected {slot.part.shape} = {list(slot.shape)}")
        elif tensor.shape != slot.shape:
            findings.add(
                f"{slot.source}: expected {slot.part.shape} = {list(slot.shape)}, "
                f"got {list(tensor.shape)} in {tensor.where}"
            )
        elif tensor.dtype not in (_FLOAT32, _BFLOAT16):
            findings.add(f"{slot.source}: expected floating-point values, got {tensor.encoding} in {tensor.where}")
    consumed |= _check_tied_head(source, findings)
    for name, tensor in tensors.items():
        if name not in consumed and not ignored(name, source.dialect):
            findings.add(f"{name}: not part of this model, {list(tensor.shape)} in {tensor.where}")
    findings.raise_if_any()
    leaves: dict[str, Leaf] = {}
    for name, spec in param_specs(config).items():
        its = tuple(by_leaf[name])
        quantized = int8 and spec.n_in > 0
        # What is quantised is quantised from the source's own values.
        kept = _leaf_dtype([tensors[slot.source] for slot in its], "keep" if quantized else dtype)
        leaves[name] = Leaf(name, spec, kept, quantized, its)
    return Plan(source, leaves)


def _check_tied_head(source: Source, findings: Findings) -> set[str]:
    """A tied model may ship its head all the same; then it must be the embedding, bit for bit."""
    head, embed = head_name(source.dialect), embed_name(source.dialect)
    if not source.config.tie_word_embeddings or head not in source.tensors:
        return set()
    if embed in source.tensors:
        one, other = source.tensors[head], source.tensors[embed]
        if (one.shape, one.dtype) != (other.shape, other.dtype) or _digest(one) != _digest(other):
            findings.add(f"{head}: tie_word_embeddings is true, but this tensor differs from {embed}")
    return {head}


def _digest(tensor: SourceTensor) -> str:
    """Stands for the bits of a tensor, so that two can be compared with one in memory."""
    return tensor_sha256(tensor.read())


def _leaf_dtype(tensors: list[SourceTensor], dtype: Dtype) -> np.dtype:
    """``keep`` loses nothing: float32 holds every float16 and every dequantised value, bfloat16 stays itself."""
    if dtype == "keep":
        return _BFLOAT16 if all(tensor.dtype == _BFLOAT16 for tensor in tensors) else _FLOAT32
    return _BFLOAT16 if dtype == "bfloat16" else _FLOAT32


class Filled(NamedTuple):
    """A group ready to be stored: arrays by tensor name, and what quantising cost."""

    tensors: dict[str, np.ndarray]
    errors: dict[str, QuantizationError]


def fill_group(plan: Plan, names: Iterable[str]) -> Filled:
    """Reads one group. Raises ConversionError where a tensor cannot be quantised."""
    arrays = plan.fill(names)
    tensors: dict[str, np.ndarray] = {}
    errors: dict[str, QuantizationError] = {}
    findings = Findings()
    for name in list(arrays):
        array = arrays.pop(name)  # as soon as it is int8, the memory is needed for the next
        if not plan.leaves[name].int8:
            tensors[name] = array
            continue
        try:
            values, scale, worst, relative = quantize(array, plan.leaves[name].spec.n_in)
        except ValueError as error:
            findings.add(f"{name}: cannot be stored as int8: {error}")
            continue
        tensors |= {name: values, name + SCALE: scale}
        errors[name] = QuantizationError(worst, relative)
    findings.raise_if_any()
    return Filled(tensors, errors)
