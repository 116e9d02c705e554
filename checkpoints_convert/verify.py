"""Is a checkpoint what it says, and what its source says?"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from checkpoints_convert.engine import Plan, make_plan
from checkpoints_convert.findings import Findings
from checkpoints_convert.progress import Reporter
from checkpoints_convert.readers import open_source
from jaxspec.checkpoint import STORED_DTYPES, Checkpoint, open_checkpoint, read_group, tensor_sha256
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


def verify(path: Path, against: Path | None, progress: Reporter) -> Verified:
    """Recomputes the sha256 of every stored tensor, and with ``against`` compares each with the source.

    A tensor that was stored in another dtype than the source's must be the source's value, rounded. Raises UserError
    when the checkpoint or the source cannot be opened.
    """
    checkpoint = open_checkpoint(path)
    plan = None if against is None else make_plan(open_source(against, "auto"), "keep")
    findings = Findings()
    if plan is not None:
        _compare_configs(checkpoint, plan, findings)
    worst: Difference | None = None
    nbytes = 0
    total = sum(record.nbytes for record in checkpoint.manifest.tensors.values())
    with progress.stage("verifying", total) as advance:
        for name, stored in _stored_tensors(checkpoint, findings):
            if tensor_sha256(stored) != checkpoint.manifest.tensors[name].sha256:
                findings.add(f"{name}: its sha256 is not the manifest's")
            if plan is not None and name in plan.leaves and plan.leaves[name].spec.shape == stored.shape:
                found = _difference(name, stored, plan, findings)
                worst = found if worst is None or found.max_abs > worst.max_abs else worst
            nbytes += stored.nbytes
            advance(stored.nbytes)
    _check_tokenizer(checkpoint, findings)
    return Verified(len(checkpoint.manifest.tensors), nbytes, worst, tuple(findings.lines))


def _stored_tensors(checkpoint: Checkpoint, findings: Findings) -> Iterator[tuple[str, np.ndarray]]:
    for group in checkpoint.groups():
        tensors: dict[str, np.ndarray] = {}
        with findings.collecting():
            tensors = read_group(checkpoint, group)
        yield from tensors.items()


def _compare_configs(checkpoint: Checkpoint, plan: Plan, findings: Findings) -> None:
    ours, theirs = checkpoint.config.to_json(), plan.source.config.to_json()
    for key, value in theirs.items():
        if ours[key] != value:
            findings.add(f"config.json: {key} is {ours[key]!r}, the source says {value!r}")


def _difference(name: str, stored: np.ndarray, plan: Plan, findings: Findings) -> Difference:
    """Compares bits with what a conversion to the stored dtype gives, and values with the source's own."""
    source = plan.fill(name)
    unequal = _unequal_bits(stored, source.astype(stored.dtype, copy=False))
    if unequal:
        findings.add(f"{name}: differs from the source in {unequal} of {stored.size} values")
    if source.dtype == stored.dtype and not unequal:
        return Difference(name, 0.0)
    one, other = stored.astype(np.float32, copy=False), source.astype(np.float32, copy=False)
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    # A NaN on both sides, or the same infinity, is no difference; on one side alone it is the worst there is.
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    return Difference(name, float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max()))


def _unequal_bits(one: np.ndarray, other: np.ndarray) -> int:
    width = np.dtype(f"u{one.dtype.itemsize}")
    return int((one.reshape(-1).view(width) != other.reshape(-1).view(width)).sum())


def _check_tokenizer(checkpoint: Checkpoint, findings: Findings) -> None:
    if checkpoint.tokenizer_dir is None:
        return
    with findings.collecting():
        fingerprint = Tokenizer.load(checkpoint.tokenizer_dir).fingerprint
        if fingerprint != checkpoint.manifest.tokenizer_fingerprint:
            findings.add(
                f"tokenizer: its fingerprint is {fingerprint}, "
                f"the manifest says {checkpoint.manifest.tokenizer_fingerprint}"
            )


def dtype_totals(checkpoint: Checkpoint) -> dict[str, tuple[int, int, int]]:
    """Per stored dtype: tensors, parameters, bytes."""
    totals = {}
    for dtype in STORED_DTYPES:
        records = [record for record in checkpoint.manifest.tensors.values() if record.dtype == dtype]
        if records:
            nbytes = sum(record.nbytes for record in records)
            totals[dtype] = (len(records), nbytes // STORED_DTYPES[dtype].itemsize, nbytes)
    return totals
