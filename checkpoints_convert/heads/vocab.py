"""The smaller vocabulary of an EAGLE-3 head: d2t holds offsets, t2d is a mask that must agree with it."""

import numpy as np

from checkpoints_convert.findings import Findings
from checkpoints_convert.heads.names import D2T, T2D
from checkpoints_convert.heads.source import ForeignHeads
from jaxspec.model.heads.config import EagleConfig

_OFFSETS = "target id = draft id + d2t[draft id]"


def target_ids(heads: ForeignHeads, config: EagleConfig, findings: Findings) -> np.ndarray | None:
    """int32 [draft_vocab_size]: the target's id of every draft id; None where there is none, or with a finding.

    llama.cpp keeps absolute ids under the same name. The mask tells which they are, so it must be there.
    """
    tensors = heads.tensors
    shapes = {D2T: (config.draft_vocab_size,), T2D: (config.vocab_size,)}
    integers, masks = (np.dtype(np.int64), np.dtype(np.int32)), (np.dtype(np.bool_),)
    kinds = {D2T: (integers, "integers"), T2D: (masks, "a mask of booleans")}
    before = len(findings.lines)
    for name, shape in shapes.items():
        if name not in tensors:
            if config.reduced_vocab:
                findings.add(f"{name} is missing: expected [{shape[0]}], {kinds[name][1]}")
            continue
        if tensors[name].shape != shape:
            findings.add(f"{name}: expected {list(shape)}, got {list(tensors[name].shape)} in {tensors[name].where}")
        if tensors[name].dtype not in kinds[name][0]:
            findings.add(f"{name}: expected {kinds[name][1]}, got {tensors[name].encoding} in {tensors[name].where}")
    if len(findings.lines) > before or D2T not in tensors:
        return None
    d2t = heads.index(D2T).astype(np.int64)
    ids = d2t + np.arange(config.draft_vocab_size)
    marked = heads.index(T2D) if T2D in tensors else np.ones(config.vocab_size, np.bool_)
    if not _agree(ids, marked):
        findings.add(_disagreement(d2t, ids, marked, config))
        return None
    return ids.astype(np.int32) if config.reduced_vocab else None


def offsets(ids: np.ndarray) -> np.ndarray:
    """d2t, int64, of target ids."""
    return ids.astype(np.int64) - np.arange(len(ids))


def mask(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """t2d, bool [V], of target ids."""
    marked = np.zeros(vocab_size, np.bool_)
    marked[ids] = True
    return marked


def _agree(ids: np.ndarray, marked: np.ndarray) -> bool:
    """Whether the ids are those that the mask marks, each once."""
    return bool(np.array_equal(np.sort(ids), np.flatnonzero(marked)))


def _disagreement(d2t: np.ndarray, ids: np.ndarray, marked: np.ndarray, config: EagleConfig) -> str:
    if _agree(d2t, marked):
        return f"{D2T}: holds absolute target ids, as llama.cpp keeps them: expected offsets ({_OFFSETS})"
    outside = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if len(outside):
        first = int(outside[0])
        return (
            f"{D2T}: {_OFFSETS}: draft id {first} gives {int(ids[first])}, outside the target's vocabulary "
            f"0..{config.vocab_size - 1} ({len(outside)} such)"
        )
    if len(np.unique(ids)) < len(ids):
        return f"{D2T}: {_OFFSETS}: {len(ids)} draft ids give only {len(np.unique(ids))} distinct target ids"
    unmarked = int((~marked[ids]).sum())
    return (
        f"{D2T} and {T2D} disagree: {len(ids)} draft ids, {int(marked.sum())} marked target ids, "
        f"{unmarked} of the draft ids' targets are not marked"
    )
