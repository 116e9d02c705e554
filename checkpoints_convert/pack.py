"""A converted checkpoint into a folder with one file of weights: what a repository can carry."""

import dataclasses
import json
from pathlib import Path
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints_convert.export.safetensors import write_safetensors
from jaxspec.checkpoint import check_destination, open_any, open_checkpoint, read_group
from jaxspec.checkpoint.manifest import DRAFT_VOCAB, MANIFEST, TensorRecord
from jaxspec.checkpoint.packed import ENDS, WEIGHTS
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig
from jaxspec.staging import StagedFolder

DTYPES: Final = ("keep", "float32", "bfloat16")


class Packed(NamedTuple):
    """What was written."""

    path: Path
    parameters: int
    dtype: str
    nbytes: int  # of the weights
    shared: tuple[str, ...]


def pack(
    src: str | Path, dst: str | Path, *, dtype: str = "keep", beside: str | Path | None = None, force: bool = False
) -> Packed:
    """Writes ``dst``, complete or not at all. Raises UserError.

    ``beside``: a converted target whose embeddings and LM head the model has, value for value; they are left out, and
    the engine takes the target's. Such a draft goes without its tokenizer, by whose fingerprint it is bound to the
    target.
    """
    src, dst = Path(src), Path(dst)
    checkpoint = open_any(src)
    check_destination(dst, force=force)
    stored: dict[str, np.ndarray] = {}
    for group in checkpoint.groups():
        stored |= read_group(checkpoint, group)
    shared = checkpoint.manifest.shared
    if beside is not None:
        shared = _shared(checkpoint.config, stored, Path(beside))
    # A draft that needs its target needs no tokenizer of its own.
    tokenizer_dir = None if shared else checkpoint.tokenizer_dir
    arrays = {name: _cast(stored[name], dtype) for name in checkpoint.specs if name not in shared}
    dtypes = {array.dtype.name for array in arrays.values() if array.dtype != np.int32}
    manifest = dataclasses.replace(
        checkpoint.manifest,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        parameter_count=sum(array.size for array in arrays.values()),
        tensors={name: TensorRecord.of(array) for name, array in arrays.items()},
        tokenizer_size=None if tokenizer_dir is None else checkpoint.manifest.tokenizer_size,
        layout=None,
        quantization_errors={},
        shared=shared,
    )
    stage = StagedFolder(dst)
    stage.create()
    try:
        directory = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        write_safetensors(stage.path / WEIGHTS, directory, arrays.__getitem__, {})
        stage.write_text("config.json", json.dumps(checkpoint.config.to_json(), indent=2) + "\n")
        if (src / DRAFT_VOCAB).is_file():
            stage.write_text(DRAFT_VOCAB, (src / DRAFT_VOCAB).read_text(encoding="utf-8"))
        if tokenizer_dir is not None:
            stage.copy_files(tokenizer_dir, "tokenizer")
        stage.write_text(MANIFEST, json.dumps(manifest.to_json(), indent=1) + "\n")
        stage.publish()
    finally:
        stage.discard()
    return Packed(dst, manifest.parameter_count, manifest.dtype, sum(x.nbytes for x in arrays.values()), shared)


def _shared(config: object, arrays: dict[str, np.ndarray], target_dir: Path) -> tuple[str, ...]:
    """The ends that model and target have in common. UserError for heads, and when there are none."""
    if not isinstance(config, LlamaConfig):
        raise UserError("beside: expected a draft model, got heads, which have no ends of the target")
    target = open_checkpoint(target_dir)
    shared = []
    for name in ENDS:
        if name in arrays and name in target.specs and target.specs[name].shape == arrays[name].shape:
            theirs = read_group(target, name)[name].astype(np.float32)
            if np.array_equal(theirs, arrays[name].astype(np.float32)):
                shared.append(name)
    if not shared:
        raise UserError(f"beside {target_dir}: expected a target with the draft's embeddings or LM head, got another")
    return tuple(shared)


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "keep" or array.dtype == np.int32:
        return array
    return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
