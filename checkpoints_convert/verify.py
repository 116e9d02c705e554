"""Is a checkpoint what it says, and what its source says?"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from checkpoints_convert.engine import make_plan
from checkpoints_convert.findings import Findings
from checkpoints_convert.heads.convert import open_heads_source
from checkpoints_convert.progress import Reporter
from checkpoints_convert.readers import open_source
from jaxspec.checkpoint import Checkpoint, open_any, read_stored, tensor_sha256
from jaxspec.checkpoint.int8 import dequantize, quantize
from jaxspec.checkpoint.manifest import SCALE
from jaxspec.model.config import LlamaConfig
from jaxspec.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a stored tensor is from the source's values; ``max_abs`` is 0 where all bits agree."""

    name: str
    max_abs: float


@dataclasses.dataclass(frozen=True)
class Verified:
    """What was compared, and everything that was wrong (nothing, when ``findings`` is empty)."""

    tensors: int
    nbytes: int
    worst: Difference | None  # None without a source to compare with
    findings: tuple[str, ...]


class Reference(Protocol):
    """A source, opened and mapped: what its leaves are and how they are read."""

    @property
    def config(self) -> Any: ...

    def groups(self) -> dict[str, list[str]]: ...

    def fill(self, names: Iterable[str], /) -> dict[str, np.ndarray]: ...


def verify(path: Path, against: Path | None, progress: Reporter) -> Verified:
    """Recomputes the sha256 of every stored tensor, and with ``against`` compares each with the source.

    A tensor that was stored in another dtype than the source's must be the source's value, rounded; one stored as int8
    must be what quantising the source gives. Raises UserError when the checkpoint or the source cannot be opened.
    """
    checkpoint = open_any(path)
    records = checkpoint.manifest.tensors
    reference = None if against is None else _reference(checkpoint, against)
    findings = Findings()
    if reference is not None:
        _compare_configs(checkpoint, reference, findings)
    known = {} if reference is None else reference.groups()
    worst: Difference | None = None
    total = sum(record.nbytes for record in records.values())
    with progress.stage("verifying", total) as advance:
        for group, names in _groups(checkpoint, known):
            stored: dict[str, np.ndarray] = {}
            with findings.collecting():
                stored = read_stored(checkpoint, group)
            for name, array in stored.items():
                if tensor_sha256(array) != records[name].sha256:
                    findings.add(f"{name}: its sha256 is not the manifest's")
                advance(array.nbytes)
            if reference is not None:
                source = reference.fill([name for name in known.get(group, ()) if name in names and name in stored])
                for found in _differences(checkpoint, stored, source, findings):
                    worst = found if worst is None or found.max_abs > worst.max_abs else worst
    _check_tokenizer(checkpoint, findings)
    return Verified(len(records), total, worst, tuple(findings.lines))


def _reference(checkpoint: Checkpoint[Any], against: Path) -> Reference:
    if isinstance(checkpoint.config, LlamaConfig):
        return make_plan(open_source(against, "auto"), "keep")
    return open_heads_source(against, None, checkpoint.config.vocab_size, "keep")


def _groups(checkpoint: Checkpoint[Any], known: Mapping[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """The checkpoint's groups with their parameters, those that a source knows in the order in which it is read."""
    groups = checkpoint.groups()
    order = [group for group in known if group in groups]
    for group in [*order, *(group for group in groups if group not in order)]:
        yield group, [name for name in groups[group] if name in checkpoint.specs]


def _compare_configs(checkpoint: Checkpoint[Any], reference: Reference, findings: Findings) -> None:
    ours, theirs = checkpoint.config.to_json(), reference.config.to_json()
    for key in theirs | ours:
        if ours.get(key) != theirs.get(key):
            findings.add(f"config.json: {key} is {ours.get(key)!r}, the source says {theirs.get(key)!r}")


def _differences(
    checkpoint: Checkpoint[Any], stored: Mapping[str, np.ndarray], source: dict[str, np.ndarray], findings: Findings
) -> Iterator[Difference]:
    """Compares bits with what a conversion to the stored dtype gives, and values with the source's own."""
    for name in list(source):
        values, ours = source.pop(name), stored[name]
        if values.shape != ours.shape:
            findings.add(f"{name}: is {list(ours.shape)}, the source's {list(values.shape)}")
            continue
        int8 = name + SCALE in stored
        if int8:
            expected, scale, *_ = quantize(values, checkpoint.specs[name].n_in)
            unequal = _unequal_bits(ours, expected) + _unequal_bits(stored[name + SCALE], scale)
            ours = dequantize(ours, stored[name + SCALE])
        else:
            unequal = _unequal_bits(ours, values.astype(ours.dtype, copy=False))
        if unequal:
            findings.add(f"{name}: differs from the source in {unequal} of {values.size} values")
        exact = values.dtype == ours.dtype and not unequal and not int8
        yield Difference(name, 0.0 if exact else _max_abs(ours, values))


def _max_abs(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one.astype(np.float32, copy=False), other.astype(np.float32, copy=False)
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    # A NaN on both sides, or the same infinity, is no difference; on one side alone it is the worst there is.
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    return float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max())


def _unequal_bits(one: np.ndarray, other: np.ndarray) -> int:
    width = np.dtype(f"u{one.dtype.itemsize}")
    return int((one.reshape(-1).view(width) != other.reshape(-1).view(width)).sum())


def _check_tokenizer(checkpoint: Checkpoint[Any], findings: Findings) -> None:
    if checkpoint.tokenizer_dir is None:
        return
    with findings.collecting():
        fingerprint = Tokenizer.load(checkpoint.tokenizer_dir).fingerprint
        if fingerprint != checkpoint.manifest.tokenizer_fingerprint:
            findings.add(
                f"tokenizer: its fingerprint is {fingerprint}, "
                f"the manifest says {checkpoint.manifest.tokenizer_fingerprint}"
            )
