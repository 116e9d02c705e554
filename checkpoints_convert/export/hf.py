"""A checkpoint folder out to a Hugging Face folder, by the table of names that brought it in, read the other way.

=================================  ===================================================================================
config.json                        see ``hf_config``
generation_config.json             what came with the checkpoint, with the begin and end tokens of its config
model.safetensors                  or, above the shard size, shards and model.safetensors.index.json
tokenizer.json, ...                the checkpoint's, with the clean-up of decoded text switched off
=================================  ===================================================================================
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import ml_dtypes
import numpy as np

from checkpoints_convert.export.destination import check_replaceable
from checkpoints_convert.export.hf_config import generation_config, hf_config
from checkpoints_convert.export.safetensors import write_safetensors
from checkpoints_convert.export.shards import parse_size, split
from checkpoints_convert.findings import Findings
from checkpoints_convert.names import Slot, slots, take
from checkpoints_convert.places import SMALL_FILES, entangled, too_small
from checkpoints_convert.progress import Advance, Reporter, Silent
from checkpoints_convert.readers.hf import GENERATION, INDEX, TOKENIZER_FILES
from checkpoints_convert.readers.jsonfile import read_object
from jaxspec.checkpoint import Checkpoint, open_checkpoint, read_stored, tensor_sha256
from jaxspec.checkpoint.int8 import dequantize
from jaxspec.checkpoint.manifest import SCALE, STORED_DTYPES, group_and_leaf
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig
from jaxspec.staging import StagedFolder

Dtype = Literal["keep", "float32", "bfloat16", "float16"]
DTYPES: Final = get_args(Dtype)
SHARD_SIZE: Final = "5GB"

_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_NUMPY: Final[Mapping[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_CAST_VALUES: Final = 4 << 20  # that are cast and looked at together


@dataclasses.dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: Path
    files: tuple[str, ...]  # that hold weights, in order
    tensors: int
    parameters: int
    dtype: str  # that of every tensor, or "mixed"
    dequantized: tuple[str, ...]  # parameters that the checkpoint stores as int8
    has_tokenizer: bool


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor to be written: the piece of a leaf that fills it, and the dtype it gets."""

    slot: Slot
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.slot.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class _Plan:
    checkpoint: Checkpoint[LlamaConfig]
    tensors: dict[str, _Tensor]  # by Hugging Face name, in checkpoint order
    files: dict[str, list[str]]
    texts: dict[str, str]  # the JSON files, by name
    copied: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def to_hf(
    src: str | Path,
    dst: str | Path,
    *,
    shard_size: int | str = SHARD_SIZE,
    dtype: Dtype = "keep",
    force: bool = False,
    progress: Reporter | None = None,
) -> Exported:
    """Writes the converted checkpoint ``src`` as the Hugging Face folder ``dst``, which transformers loads.

    ``shard_size``: bytes of weights in one file (``5GB``, ``500MB``, ...); a larger tensor gets a file of its own.
    ``dtype``: ``keep`` writes each tensor as it is stored, int8 ones multiplied out to float32. ``force``: replace an
    earlier Hugging Face folder at ``dst``, and nothing else. Raises ConversionError listing everything that is wrong,
    tensors included whose sha256 is not the manifest's; then, and on any other failure, nothing is left at ``dst``.
    """
    src, dst, report = Path(src), Path(dst), progress or Silent()
    plan = _check(src, dst, shard_size, dtype, force)
    stage = StagedFolder(dst)
    stage.create()
    try:
        with report.stage("exporting", plan.nbytes) as advance:
            _write_weights(plan, stage.path, advance)
        for name, text in plan.texts.items():
            stage.write_text(name, text)
        for file in plan.copied:
            shutil.copyfile(file, stage.path / file.name)
        with report.stage("syncing to disk", plan.nbytes):
            stage.publish()
    finally:
        stage.discard()
    manifest = plan.checkpoint.manifest
    return Exported(
        path=dst,
        files=tuple(plan.files),
        tensors=len(plan.tensors),
        parameters=manifest.parameter_count,
        dtype=_one_or("mixed", plan.tensors),
        dequantized=tuple(name for name, record in manifest.tensors.items() if record.dtype == "int8"),
        has_tokenizer=plan.checkpoint.tokenizer_dir is not None,
    )


def _check(src: Path, dst: Path, shard_size: int | str, dtype: Dtype, force: bool) -> _Plan:
    """Everything that can be found wrong before a weight is read."""
    findings = Findings()
    limit, plan = 1, None
    with findings.collecting():
        limit = parse_size(shard_size)
    if dtype not in DTYPES:
        findings.add(f"dtype: expected {', '.join(DTYPES)}, got {dtype!r}")
    if line := entangled(src, dst):
        findings.add(line)
    with findings.collecting():
        check_replaceable(dst, force=force)
    with findings.collecting():
        checkpoint = open_checkpoint(src)
        if dtype in DTYPES:
            with findings.collecting():
                plan = _make_plan(checkpoint, dtype, limit)
    if line := too_small(dst, 0 if plan is None else plan.nbytes + SMALL_FILES):
        findings.add(line)
    findings.raise_if_any()
    assert plan is not None
    return plan


def _make_plan(checkpoint: Checkpoint[LlamaConfig], dtype: Dtype, limit: int) -> _Plan:
    config, folder = checkpoint.config, checkpoint.tokenizer_dir
    tensors = {
        slot.source: _Tensor(slot, _written_dtype(checkpoint.manifest.tensors[slot.leaf].dtype, dtype))
        for slot in slots(config, "hf")
    }
    files = split({name: tensor.nbytes for name, tensor in tensors.items()}, limit)
    findings = Findings()
    texts: dict[str, str] = {}
    with findings.collecting():
        # For tensors of several types the one that holds them all; a reader that obeys loses nothing.
        texts["config.json"] = _json(hf_config(config, _one_or("float32", tensors)))
    with findings.collecting():
        carried = read_object(folder / GENERATION) if folder and (folder / GENERATION).is_file() else {}
        texts[GENERATION] = _json(generation_config(config, carried))
    copied: list[Path] = []
    if folder is not None:
        with findings.collecting():
            texts[_TOKENIZER_CONFIG] = _json(_tokenizer_config(folder))
        copied = [folder / name for name in TOKENIZER_FILES if name not in texts and (folder / name).is_file()]
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        total = sum(tensor.nbytes for tensor in tensors.values())
        texts[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    findings.raise_if_any()
    return _Plan(checkpoint, tensors, files, texts, tuple(copied))


def _written_dtype(stored: str, dtype: Dtype) -> np.dtype[Any]:
    if dtype != "keep":
        return _NUMPY[dtype]
    return _NUMPY["float32"] if stored == "int8" else STORED_DTYPES[stored]


def _one_or(otherwise: str, tensors: Mapping[str, _Tensor]) -> str:
    names = {tensor.dtype.name for tensor in tensors.values()}
    return names.pop() if len(names) == 1 else otherwise


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, such that transformers uses tokenizer.json as it stands."""
    path = folder / _TOKENIZER_CONFIG
    config = read_object(path) if path.is_file() else {}
    config["clean_up_tokenization_spaces"] = False  # clean-up would break decode(encode(text)) == text
    # Without these it would make a SentencePiece tokenizer of it, by the model's type, or give the model token types.
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config.setdefault("model_input_names", ["input_ids", "attention_mask"])
    return config


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


class _Weights:
    """Tensors by their Hugging Face names, cut out of the checkpoint's leaves: one group in memory at a time."""

    def __init__(self, plan: _Plan) -> None:
        self._checkpoint = plan.checkpoint
        self._tensors = plan.tensors
        self._group = ""
        self._leaves: dict[str, np.ndarray] = {}

    def read(self, name: str) -> np.ndarray:
        """Raises ConversionError when its group is not what the manifest says, or when it does not fit its dtype."""
        tensor = self._tensors[name]
        self.load(group_and_leaf(tensor.slot.leaf)[0])
        piece = take(self._leaves[tensor.slot.leaf], tensor.slot, self._checkpoint.config, "hf")
        return _cast(name, piece, tensor.dtype)

    def load(self, group: str) -> None:
        if group == self._group:
            return
        self._group, self._leaves = "", {}  # the last group goes before the next one comes
        stored = read_stored(self._checkpoint, group)
        findings = Findings()
        for name, array in stored.items():
            if tensor_sha256(array) != self._checkpoint.manifest.tensors[name].sha256:
                findings.add(f"{name}: its sha256 is not the manifest's")
        findings.raise_if_any()
        for name in self._checkpoint.groups()[group]:
            if name + SCALE in stored:
                stored[name] = dequantize(stored[name], stored.pop(name + SCALE))
        self._group, self._leaves = group, stored

    def check_all(self, findings: Findings) -> None:
        """Reads everything again for its findings alone."""
        for group in self._checkpoint.groups():
            with findings.collecting():
                self.load(group)
                for name, tensor in self._tensors.items():
                    if group_and_leaf(tensor.slot.leaf)[0] == group:
                        with findings.collecting():
                            self.read(name)


def _write_weights(plan: _Plan, folder: Path, advance: Advance) -> None:
    weights = _Weights(plan)

    def fill(name: str) -> np.ndarray:
        array = weights.read(name)
        advance(array.nbytes)
        return array

    try:
        for file, names in plan.files.items():
            directory = {name: (plan.tensors[name].dtype, plan.tensors[name].slot.shape) for name in names}
            write_safetensors(folder / file, directory, fill, {"format": "pt"})
    except UserError:
        # Nothing is written any more, but the user hears of everything at once.
        findings = Findings()
        weights.check_all(findings)
        findings.raise_if_any()
        raise


def _cast(name: str, array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """``array`` in ``dtype``, rounded to nearest even. Raises UserError when a finite value becomes infinite."""
    if array.dtype == dtype:
        return array
    cast = np.empty(array.shape, dtype)
    lost = 0
    step = max(1, _CAST_VALUES * len(array) // array.size)
    for first in range(0, len(array), step):
        rows = slice(first, first + step)
        with np.errstate(over="ignore", invalid="ignore"):
            cast[rows] = array[rows]
        lost += int(np.isinf(cast[rows]).sum()) - int(np.isinf(array[rows]).sum())
    if lost:
        raise UserError(
            f"{name}: {lost} of {array.size} values are too large for {dtype.name}; keep, float32 or bfloat16"
        )
    return cast
