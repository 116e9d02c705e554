"""Exactly once for heads: every source tensor is consumed or on a named ignore list, every leaf is filled.

:class:`Heads` is what is written from, wherever the heads come from.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np

from checkpoints_convert.engine import Dtype
from checkpoints_convert.findings import Findings
from checkpoints_convert.heads.names import D2T, T2D, HeadSlot, group_size, head_slots, ignored
from checkpoints_convert.heads.source import ForeignHeads
from checkpoints_convert.heads.vocab import target_ids
from checkpoints_convert.readers.base import SourceTensor
from checkpoints_convert.readers.files import SourceFile
from jaxspec.checkpoint import Checkpoint, read_group
from jaxspec.checkpoint.manifest import MANIFEST, STORED_DTYPES, Manifest, group_and_leaf, grouped
from jaxspec.model.heads.config import EagleConfig, HeadsConfig
from jaxspec.model.heads.params import INDEX_LEAVES, heads_param_specs

_FLOAT32, _BFLOAT16, _INT32 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int32)
_FLOATS: Final = (_FLOAT32, _BFLOAT16)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads that were opened and found whole, in our layout; no weight is read yet."""

    config: HeadsConfig
    source_format: str
    files: Mapping[str, SourceFile]
    dtypes: Mapping[str, np.dtype]  # of every leaf
    fill: Callable[[Iterable[str]], dict[str, np.ndarray]]  # leaves of one group, in these dtypes
    group_order: tuple[str, ...]  # groups in the order in which they are best read
    manifest: Manifest | None = None  # where the heads are ours already
    notes: tuple[str, ...] = ()  # what a user should know though nothing is wrong

    def groups(self) -> dict[str, list[str]]:
        """Names of the leaves by group, in reading order."""
        by_group = grouped(heads_param_specs(self.config))
        return {group: by_group[group] for group in self.group_order}

    @property
    def nbytes(self) -> int:
        specs = heads_param_specs(self.config)
        return sum(math.prod(specs[name].shape) * dtype.itemsize for name, dtype in self.dtypes.items())


def planned(foreign: ForeignHeads, config: HeadsConfig, dtype: Dtype) -> Heads:
    """Maps every tensor of foreign heads to its place. Raises ConversionError with one finding per tensor that has no
    place, is missing, or has another shape than the config implies."""
    findings = Findings()
    tensors = foreign.tensors
    slots = _unshared(head_slots(config, foreign.dialect), tensors)
    consumed = {slot.source for slot in slots}
    ids: np.ndarray | None = None
    if isinstance(config, EagleConfig) and config.method == "eagle3":
        ids = target_ids(foreign, config, findings)
        consumed |= {D2T, T2D}
    for slot in slots:
        if slot.leaf not in INDEX_LEAVES:
            _check(slot, tensors.get(slot.source), findings)
    for name, tensor in tensors.items():
        if name not in consumed and not ignored(name):
            findings.add(f"{name}: not part of these heads, {list(tensor.shape)} in {tensor.where}")
    findings.raise_if_any()
    by_leaf: dict[str, list[HeadSlot]] = {}
    for slot in slots:
        by_leaf.setdefault(slot.leaf, []).append(slot)
    specs = heads_param_specs(config)
    dtypes = {name: _dtype(name, [tensors[slot.source] for slot in by_leaf[name]], dtype) for name in specs}

    def fill(names: Iterable[str]) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        pairs = [(slot, tensors[slot.source]) for name in names for slot in by_leaf[name]]
        for slot, tensor in sorted(pairs, key=lambda pair: pair[1].place):
            leaf = slot.leaf
            if leaf in INDEX_LEAVES:
                assert ids is not None
                arrays[leaf] = ids
                continue
            array = tensor.read()
            if slot.part.whole and array.dtype == dtypes[leaf]:
                arrays[leaf] = array.reshape(specs[leaf].shape)
                continue
            if leaf not in arrays:
                arrays[leaf] = np.empty(specs[leaf].shape, dtypes[leaf])
            piece = slot.piece(arrays[leaf], group_size(config))
            piece[...] = array.reshape(piece.shape)
        return arrays

    def first(group: str) -> tuple[str, int]:
        return min(tensors[slot.source].place for name in by_group[group] for slot in by_leaf[name])

    by_group = grouped(specs)
    order = tuple(sorted(by_group, key=first))
    return Heads(config, foreign.dialect, foreign.files, dtypes, fill, order)


def ours(checkpoint: Checkpoint[HeadsConfig], dtype: Dtype) -> Heads:
    """Heads of our own folder. int8 parameters are multiplied out."""
    stored = checkpoint.manifest.tensors
    dtypes: dict[str, np.dtype] = {}
    for name in checkpoint.specs:
        kept = _BFLOAT16 if stored[name].dtype == "bfloat16" else _FLOAT32
        dtypes[name] = _INT32 if name in INDEX_LEAVES else kept if dtype == "keep" else STORED_DTYPES[dtype]

    def fill(names: Iterable[str]) -> dict[str, np.ndarray]:
        wanted = list(names)
        group = read_group(checkpoint, group_and_leaf(wanted[0])[0])
        return {name: group[name].astype(dtypes[name], copy=False) for name in wanted}

    files = {name: SourceFile(checkpoint.path / name) for name in (MANIFEST, "config.json")}
    order = tuple(grouped(checkpoint.specs))
    return Heads(checkpoint.config, "jaxspec", files, dtypes, fill, order, checkpoint.manifest)


def is_ours(path: Path) -> bool:
    """Whether a path is a folder that this project wrote."""
    return (path / MANIFEST).is_file()


def _unshared(slots: list[HeadSlot], tensors: Mapping[str, SourceTensor]) -> list[HeadSlot]:
    """``[ResBlock] * n`` of the authors is one module n times: a file that keeps shared tensors once has block 0."""
    several = {name.partition(".")[0] for name in tensors if re.fullmatch(r"\d+\.[1-9]\d*\.linear\..*", name)}

    def found(slot: HeadSlot) -> HeadSlot:
        if slot.source in tensors or ".block" not in slot.leaf:
            return slot
        head, _, rest = slot.source.split(".", 2)
        only = f"{head}.0.{rest}"
        return slot if head in several or only not in tensors else slot._replace(source=only)

    return [found(slot) for slot in slots]


def _check(slot: HeadSlot, tensor: SourceTensor | None, findings: Findings) -> None:
    if tensor is None:
        why = ""
        if slot.leaf == "fc_bias":
            why = " (config.json does not say bias: false, and a missing key means true)"
        findings.add(f"{slot.source} is missing: expected {list(slot.shape)}{why}")
    elif tensor.shape != slot.shape:
        findings.add(f"{slot.source}: expected {list(slot.shape)}, got {list(tensor.shape)} in {tensor.where}")
    elif tensor.dtype not in _FLOATS:
        findings.add(f"{slot.source}: expected floating-point values, got {tensor.encoding} in {tensor.where}")


def _dtype(name: str, tensors: list[SourceTensor], dtype: Dtype) -> np.dtype:
    if name in INDEX_LEAVES:
        return _INT32
    if dtype != "keep":
        return STORED_DTYPES[dtype]
    return _BFLOAT16 if all(tensor.dtype == _BFLOAT16 for tensor in tensors) else _FLOAT32
