"""The exactly-once engine: every source tensor is consumed or on a named ignore list, every leaf is filled.

A plan is made from the directory alone and lists all failures before anything is read; then leaves are filled group by
group, one source tensor in memory at a time.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final, Literal

import ml_dtypes
import numpy as np

from checkpoints_convert.findings import Findings
from checkpoints_convert.names import Slot, embed_name, head_name, ignored, place, slots
from checkpoints_convert.readers import Source, SourceTensor
from jaxspec.checkpoint import grouped
from jaxspec.model.params import ParamSpec, param_specs

Dtype = Literal["keep", "float32", "bfloat16"]
DTYPES: Final = ("keep", "float32", "bfloat16")

_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter to be stored, and the source tensors that fill it."""

    name: str
    spec: ParamSpec
    dtype: np.dtype
    slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every leaf of the model, checked against the source."""

    source: Source
    leaves: dict[str, Leaf]

    @property
    def nbytes(self) -> int:
        return sum(np.prod(leaf.spec.shape, dtype=int).item() * leaf.dtype.itemsize for leaf in self.leaves.values())

    @property
    def parameter_count(self) -> int:
        return sum(np.prod(leaf.spec.shape, dtype=int).item() for leaf in self.leaves.values())

    def groups(self) -> dict[str, list[str]]:
        return grouped(self.leaves)

    def fill(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """Reads the source tensors of a leaf and puts them together, in the planned dtype or in ``dtype``."""
        leaf = self.leaves[name]
        dtype = leaf.dtype if dtype is None else dtype
        array: np.ndarray | None = None
        for slot in leaf.slots:
            tensor = self.source.tensors[slot.source].read()
            if slot.part.whole and tensor.dtype == dtype:
                return tensor.reshape(leaf.spec.shape)
            array = np.empty(leaf.spec.shape, dtype) if array is None else array
            place(tensor, array, slot, self.source.config, self.source.dialect)
        assert array is not None
        return array


def make_plan(source: Source, dtype: Dtype) -> Plan:
    """Maps every source tensor to its place. Raises ConversionError with one finding per tensor that has none, is
    missing, or has another shape than the config implies."""
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
    consumed |= _check_tied_head(source, findings)
    for name, tensor in tensors.items():
        if name not in consumed and not ignored(name, source.dialect):
            findings.add(f"{name}: not part of this model, {list(tensor.shape)} in {tensor.where}")
    findings.raise_if_any()
    specs = param_specs(config)
    leaves = {
        name: Leaf(
            name,
            specs[name],
            _leaf_dtype([tensors[slot.source] for slot in by_leaf[name]], dtype),
            tuple(by_leaf[name]),
        )
        for name in specs
    }
    return Plan(source, leaves)


def _check_tied_head(source: Source, findings: Findings) -> set[str]:
    """A tied model may ship its head all the same; then it must be the embedding, bit for bit."""
    head, embed = head_name(source.dialect), embed_name(source.dialect)
    if not source.config.tie_word_embeddings or head not in source.tensors:
        return set()
    if embed in source.tensors:
        one, other = source.tensors[head], source.tensors[embed]
        if one.shape != other.shape or not _equal_bits(one.read, other.read):
            findings.add(f"{head}: tie_word_embeddings is true, but this tensor differs from {embed}")
    return {head}


def _equal_bits(one: Callable[[], np.ndarray], other: Callable[[], np.ndarray]) -> bool:
    left, right = one(), other()
    return left.dtype == right.dtype and bool(
        np.array_equal(left.reshape(-1).view(np.uint8), right.reshape(-1).view(np.uint8))
    )


def _leaf_dtype(tensors: list[SourceTensor], dtype: Dtype) -> np.dtype:
    """``keep`` loses nothing: float32 holds every float16 and every dequantised value, bfloat16 stays itself."""
    if dtype == "keep":
        return _BFLOAT16 if all(tensor.bfloat16 for tensor in tensors) else _FLOAT32
    return _BFLOAT16 if dtype == "bfloat16" else _FLOAT32


def filled_groups(plan: Plan) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Groups in checkpoint order, each with its leaves by their key inside the group."""
    for group, names in plan.groups().items():
        yield group, {name.rpartition(".")[2]: plan.fill(name) for name in names}
