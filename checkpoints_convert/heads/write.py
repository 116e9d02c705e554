"""Heads out again: the authors' files and vLLM's speculators format."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import numpy as np

from checkpoints_convert.export.safetensors import write_safetensors
from checkpoints_convert.findings import Findings
from checkpoints_convert.heads.names import D2T, T2D, HeadsDialect, HeadSlot, group_size, head_slots
from checkpoints_convert.heads.plan import Heads
from checkpoints_convert.heads.source import CONFIG
from checkpoints_convert.heads.vocab import mask, offsets
from checkpoints_convert.heads.write_configs import foreign_json, unsayable
from jaxspec.checkpoint import Checkpoint, read_group
from jaxspec.checkpoint.manifest import group_and_leaf
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads.config import EagleConfig, HeadsConfig, MedusaConfig
from jaxspec.model.heads.params import heads_param_specs
from jaxspec.staging import StagedFolder

To = Literal["orbax", "medusa", "eagle", "eagle3", "speculators"]
_FILE: Final = {"medusa": "medusa_lm_head.safetensors"}
_MODEL: Final = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Export:
    """Everything that will be written, checked."""

    dialect: HeadsDialect
    config: HeadsConfig  # as the format has it: tables that it demands are there
    directory: dict[str, tuple[np.dtype, tuple[int, ...]]]
    fill: Callable[[str], np.ndarray]


def exported(heads: Heads, to: To, target: Checkpoint[LlamaConfig] | None) -> Export:
    """Plans the foreign file. Raises ConversionError with everything that the format has no place for."""
    findings = Findings()
    dialect = _dialect(heads.config, to)
    unsayable(heads.config, dialect, target, findings)
    config, borrowed = _with_tables(heads.config, dialect, target, findings)
    leaves = _Leaves(heads, borrowed, target)
    if isinstance(config, MedusaConfig) and config.num_layers > 1:
        _check_blocks(config, leaves, findings)
    findings.raise_if_any()
    slots = {slot.source: slot for slot in head_slots(config, dialect)}
    directory = {name: (leaves.dtype(slot), slot.shape) for name, slot in slots.items()}
    reduced = isinstance(config, EagleConfig) and config.reduced_vocab
    if reduced:
        directory[D2T] = (np.dtype(np.int64), slots[D2T].shape)
        directory[T2D] = (np.dtype(np.bool_), (config.vocab_size,))

    def fill(name: str) -> np.ndarray:
        if name in (D2T, T2D):
            ids = leaves.read("target_ids")
            return offsets(ids) if name == D2T else mask(ids, config.vocab_size)
        slot = slots[name]
        return slot.piece(leaves.read(slot.leaf), group_size(config)).reshape(slot.shape)

    return Export(dialect, config, directory, fill)


def write_export(export: Export, dst: Path, base: str | None) -> None:
    """Writes the folder whole, or nothing."""
    floats = {dtype.name for name, (dtype, _) in export.directory.items() if name not in (D2T, T2D)}
    torch_dtype = floats.pop() if len(floats) == 1 else "float32"
    stage = StagedFolder(dst)
    stage.create()
    try:
        text = json.dumps(foreign_json(export.config, export.dialect, torch_dtype, base), indent=2) + "\n"
        stage.write_text(CONFIG, text)
        file = _FILE.get(export.dialect, _MODEL)
        write_safetensors(stage.path / file, export.directory, export.fill, {"format": "pt"})
        stage.publish()
    finally:
        stage.discard()


def check_foreign_destination(dst: Path, to: To, *, force: bool) -> None:
    """Raises UserError unless heads may be written to ``dst``. ``force`` replaces such heads, nothing else."""
    if not dst.exists() and not dst.is_symlink():
        return
    if not force:
        raise UserError(f"{dst}: exists already; give --force to replace it")
    known = {CONFIG, _FILE.get(to, _MODEL)}
    if not dst.is_dir() or dst.is_symlink() or any(path.name not in known for path in dst.iterdir()):
        raise UserError(f"{dst}: exists and is not a folder of {to} heads alone; not replaced, even with --force")


def _dialect(config: HeadsConfig, to: To) -> HeadsDialect:
    if to == "speculators":
        if config.method == "medusa":
            raise UserError("--to speculators: expected eagle or eagle3 heads (the format has no Medusa), got medusa")
        return "speculators-eagle" if config.method == "eagle" else "speculators-eagle3"
    assert to != "orbax"
    if to != config.method:
        raise UserError(f"--to {to}: the heads are {config.method}; a method cannot be converted into another")
    return to


def _with_tables(
    config: HeadsConfig, dialect: HeadsDialect, target: Checkpoint[LlamaConfig] | None, findings: Findings
) -> tuple[HeadsConfig, str]:
    """The config with the tables that the format demands, and which of the target's then stands in."""
    if isinstance(config, MedusaConfig) and not config.own_lm_head:
        borrowed, wanted, config = "lm_head", "an LM head in every head", dataclasses.replace(config, own_lm_head=True)
    elif isinstance(config, EagleConfig) and dialect == "eagle" and not config.own_embed:
        borrowed, wanted, config = "embed", "the embeddings in the file", dataclasses.replace(config, own_embed=True)
    else:
        return config, ""
    if target is None:
        findings.add(f"--to {dialect}: the format wants {wanted}, these heads use the target's: give --target")
    return config, borrowed


class _Leaves:
    """Reads leaves group by group; the last group is kept, since a leaf may hold several foreign tensors."""

    def __init__(self, heads: Heads, borrowed: str, target: Checkpoint[LlamaConfig] | None) -> None:
        self._heads = heads
        self._borrowed = borrowed
        self._target = target
        self._group = ""
        self._arrays: dict[str, np.ndarray] = {}
        self._own = heads_param_specs(heads.config)

    def dtype(self, slot: HeadSlot) -> np.dtype:
        return self._heads.dtypes[slot.leaf] if slot.leaf in self._own else np.dtype(np.float32)

    def read(self, leaf: str) -> np.ndarray:
        group = group_and_leaf(leaf)[0] if leaf in self._own else f"target {self._borrowed}"
        if group != self._group:
            self._arrays.clear()
            self._arrays = self._read(leaf, group)
            self._group = group
        return self._arrays[leaf if leaf in self._own else self._borrowed]

    def _read(self, leaf: str, group: str) -> dict[str, np.ndarray]:
        if leaf in self._own:
            return self._heads.fill(self._heads.groups()[group])
        assert self._target is not None
        tied = self._borrowed == "lm_head" and self._target.config.tie_word_embeddings
        name = "embed" if tied else self._borrowed
        return {self._borrowed: read_group(self._target, name)[name].astype(np.float32, copy=False)}


def _check_blocks(config: MedusaConfig, leaves: _Leaves, findings: Findings) -> None:
    """The authors' ``[ResBlock] * n`` is one module n times: their loader gives every block the last one's values."""
    for head in range(config.num_heads):
        for kind in ("", "_bias"):
            blocks = [leaves.read(f"heads.{head}.block{block}{kind}") for block in range(config.num_layers)]
            if any(not np.array_equal(block, blocks[0]) for block in blocks[1:]):
                findings.add(
                    f"medusa: head {head}: its {config.num_layers} blocks differ, the authors' loader shares one"
                )
