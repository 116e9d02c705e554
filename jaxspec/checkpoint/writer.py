"""Writing a checkpoint folder: group by group, whole or not at all, and from where a killed run stopped."""

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import jax
import numpy as np

from jaxspec.checkpoint.manifest import DRAFT_VOCAB, MANIFEST, Manifest, TensorRecord, contradictions, group_and_leaf
from jaxspec.checkpoint.orbax import save_item
from jaxspec.checkpoint.restore import stored_problems
from jaxspec.errors import UserError
from jaxspec.model.params import ParamSpec
from jaxspec.staging import StagedFolder, sync_tree

_JOURNAL: Final = "finished-groups.jsonl"


class Config(Protocol):
    """A model's or heads' frozen config."""

    def to_json(self) -> dict[str, Any]: ...


class CheckpointWriter:
    """Writes a checkpoint folder that appears complete at ``dst``, or not at all.

    ``with CheckpointWriter(dst, force=False) as writer:`` then :meth:`write_group` for every group that is not yet in
    ``finished``, then :meth:`finish`. Leaving the block without finish removes everything. Raises UserError when
    ``dst`` is taken.

    ``resume_key``: names what is being written. With it, every finished group is on disk for good; a run that is killed
    or interrupted leaves them, and the next writer with the same key finds them in ``finished``, each with the notes
    that were given with it.
    """

    def __init__(self, dst: str | Path, *, force: bool, resume_key: str | None = None) -> None:
        check_destination(dst, force=force)
        self._resumable = resume_key is not None
        self._stage = StagedFolder(Path(dst), resume_key)
        self.tensors: dict[str, TensorRecord] = {}
        self.finished: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        self._stage.create()
        if self._resumable:
            self._take_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._resumable and isinstance(error, KeyboardInterrupt):
            self._stage.leave()
        else:
            self._stage.discard()

    def write_group(
        self,
        group: str,
        leaves: Mapping[str, np.ndarray],
        *,
        shardings: Mapping[str, jax.sharding.Sharding] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes one Orbax item. ``leaves``: arrays by their key inside the group.

        ``shardings``, by the same keys: devices of such a mesh will each find their own pieces in files of their own.
        ``notes``: a JSON object kept with the group in case of a resume.
        """
        names = {leaf: leaf if group_and_leaf(leaf)[0] == group else f"{group}.{leaf}" for leaf in leaves}
        with ThreadPoolExecutor(1) as hashing:  # beside the writing
            records = hashing.map(TensorRecord.of, leaves.values())
            save_item(self._stage.path / "params" / group, _laid_out(leaves, shardings or {}))
            tensors = dict(zip(names.values(), records, strict=True))
        self.tensors |= tensors
        self.finished[group] = dict(notes or {})
        if self._resumable:
            self._record(group, tensors, notes or {})

    def finish(
        self,
        config: Config,
        specs: Mapping[str, ParamSpec],
        manifest: Manifest,
        tokenizer_dir: Path | None,
        draft_vocab: str | None = None,
    ) -> None:
        """Adds the remaining files and moves the folder into place. ``draft_vocab``: the text of DRAFT_VOCAB."""
        if problems := contradictions(specs, manifest.tensors):
            raise ValueError(f"checkpoint is not complete: {'; '.join(problems)}")
        if tokenizer_dir is not None:
            shutil.rmtree(self._stage.path / "tokenizer", ignore_errors=True)  # of the run before
            self._stage.copy_files(tokenizer_dir, "tokenizer")
        self._stage.write_text("config.json", json.dumps(config.to_json(), indent=2) + "\n")
        if draft_vocab is not None:
            self._stage.write_text(DRAFT_VOCAB, draft_vocab)
        (self._stage.path / _JOURNAL).unlink(missing_ok=True)
        self._stage.write_text(MANIFEST, json.dumps(manifest.to_json(), indent=1) + "\n")
        self._stage.publish()

    def _record(self, group: str, tensors: Mapping[str, TensorRecord], notes: Mapping[str, Any]) -> None:
        sync_tree(self._stage.path / "params" / group)
        line = {"group": group, "tensors": {name: vars(record) for name, record in tensors.items()}, "notes": notes}
        with (self._stage.path / _JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(line) + "\n")

    def _take_up(self) -> None:
        """Finds what an earlier run finished, and clears what it had only begun."""
        journal, params = self._stage.path / _JOURNAL, self._stage.path / "params"
        kept: list[str] = []
        for line in journal.read_text(encoding="utf-8").splitlines() if journal.is_file() else ():
            try:
                entry = json.loads(line)
            except ValueError:  # the line that was being written
                break
            tensors = {name: TensorRecord.from_json(record, name) for name, record in entry["tensors"].items()}
            if stored_problems(params, entry["group"], tensors):
                continue
            self.finished[entry["group"]] = entry["notes"]
            self.tensors |= tensors
            kept.append(line + "\n")
        journal.write_text("".join(kept), encoding="utf-8")
        for item in params.iterdir() if params.is_dir() else ():
            if item.name not in self.finished:
                shutil.rmtree(item)


def check_destination(dst: str | Path, *, force: bool) -> None:
    """Raises UserError unless a checkpoint may be written to ``dst``. ``force`` replaces checkpoints, nothing else."""
    dst = Path(dst)
    if not dst.exists() and not dst.is_symlink():
        return
    if not force:
        raise UserError(f"{dst}: exists already; give --force to replace it")
    if not dst.is_dir() or dst.is_symlink() or (any(dst.iterdir()) and not (dst / MANIFEST).is_file()):
        raise UserError(
            f"{dst}: exists and is not a checkpoint folder (no {MANIFEST}); not replaced, even with --force"
        )


def _laid_out(leaves: Mapping[str, np.ndarray], shardings: Mapping[str, jax.sharding.Sharding]) -> dict[str, Any]:
    return {
        leaf: jax.make_array_from_callback(array.shape, shardings[leaf], array.__getitem__)
        if leaf in shardings
        else array
        for leaf, array in leaves.items()
    }
