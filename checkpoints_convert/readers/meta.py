"""A folder of Meta's original format: params.json, consolidated.NN.pth (one per model-parallel rank), tokenizer.model.

A set of files holds one model, each tensor cut along one axis or repeated in every file. Which of the two, and which
axis, follows from the shapes: Llama 3 cuts the embedding by rows, Llama 2 by columns, and no file says which it is.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from checkpoints_convert.findings import Findings
from checkpoints_convert.names import Dialect, embed_name, head_name, slots
from checkpoints_convert.readers.base import SourceTensor
from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.jsonfile import read_object
from checkpoints_convert.readers.meta_config import (
    PARAMS,
    EndTokens,
    WeightSizes,
    is_llama_3_1,
    llama_config,
    vocabulary,
)
from checkpoints_convert.readers.pth import PthTensor, read_pth
from checkpoints_convert.tokenizer_tiktoken import MAX_FILE, TiktokenModel, read_tokenizer_model
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig

SHARD: Final = re.compile(r"consolidated\.(\d{2})\.pth")
TOKENIZER: Final = "tokenizer.model"
_W1: Final = "layers.0.feed_forward.w1.weight"
_EMBED, _HEAD = embed_name("meta"), head_name("meta")

# Every rank trains its own copy of a norm. Copies may differ by this much, and those in bfloat16 by one step of its
# eight bits: Meta's 70B Llama 3 has such. Then the first file's values are taken, never a mean.
NORM_TOLERANCE: Final = 1e-4
BFLOAT16_STEP: Final = 2.0**-7  # of the value
_COMPARED_BYTES: Final = 16 << 20

Pieces = Sequence[PthTensor]


@dataclasses.dataclass(frozen=True)
class MetaSource:
    """See :class:`checkpoints_convert.readers.base.Source`."""

    config: LlamaConfig
    tensors: Mapping[str, SourceTensor]
    files: Mapping[str, SourceFile]
    tokenizer: TiktokenModel | UserError | None  # an error is raised when the tokenizer is asked for
    dialect: Dialect = "meta"

    def write_tokenizer(self, dst: Path) -> bool:
        if isinstance(self.tokenizer, UserError):
            raise self.tokenizer
        if self.tokenizer is None:
            return False
        self.tokenizer.write(dst)
        return True


def is_meta_folder(folder: Path) -> bool:
    """Whether a folder looks like Meta's: its params.json, or a shard by its name."""
    return (folder / PARAMS).is_file() or any(SHARD.fullmatch(path.name) for path in folder.iterdir())


def open_meta(folder: Path) -> MetaSource:
    """Opens a folder. Raises ConversionError with everything that is missing or contradictory in it."""
    findings = Findings()
    params: dict[str, Any] = {}
    with findings.collecting():
        params = read_object(folder / PARAMS)
    shards: list[tuple[SourceFile, dict[str, PthTensor]]] = []
    with findings.collecting():
        shards = _read_shards(folder)
    findings.raise_if_any()
    names = [PARAMS, *([TOKENIZER] if (folder / TOKENIZER).is_file() else [])]
    others = {name: SourceFile(folder / name) for name in names}
    pieces: dict[str, list[PthTensor]] = {}
    for _, tensors in shards:
        for name, tensor in tensors.items():
            pieces.setdefault(name, []).append(tensor)
    with findings.collecting():
        _check_everywhere(shards, pieces)
    findings.raise_if_any()
    sizes = _weight_sizes(params, pieces)
    tokenizer: TiktokenModel | UserError | None = None
    if TOKENIZER in others:
        try:
            tokenizer = _read_tokenizer(others[TOKENIZER], params, sizes)
        except UserError as error:
            tokenizer = error  # of no account where another tokenizer is given
    ends = EndTokens(tokenizer.bos, tokenizer.eos) if isinstance(tokenizer, TiktokenModel) else EndTokens(None, ())
    config = llama_config(params, sizes, ends)
    tensors = _merge(config, pieces)
    return MetaSource(config, tensors, {file.name: file for file, _ in shards} | others, tokenizer)


def _read_tokenizer(file: SourceFile, params: Mapping[str, Any], sizes: WeightSizes) -> TiktokenModel:
    if file.size > MAX_FILE:
        raise UserError(f"{file.name}: {file.size} bytes: expected at most {MAX_FILE}")
    data = file.read(0, file.size, "the ranks").tobytes()
    vocab_size = vocabulary(params) or sizes.vocab_size
    return read_tokenizer_model(data, file.name, vocab_size, llama_3_1=is_llama_3_1(params))


def _read_shards(folder: Path) -> list[tuple[SourceFile, dict[str, PthTensor]]]:
    """The files of the set in the order of their ranks. A rank that is missing and a file that is none are findings."""
    findings = Findings()
    found = sorted(path.name for path in folder.iterdir() if path.suffix == ".pth")
    ranks = [name for name in found if SHARD.fullmatch(name)]
    for name in sorted(set(found) - set(ranks)):
        findings.add(f"{name}: not part of the set consolidated.00.pth, ..: move it out of the folder")
    expected = [f"consolidated.{rank:02}.pth" for rank in range(int(ranks[-1].split(".")[1]) + 1 if ranks else 1)]
    for name in expected:
        if name not in ranks:
            findings.add(f"{name}: expected in {folder}, found {', '.join(ranks) or 'none'}")
    findings.raise_if_any()
    shards = []
    for name in ranks:
        with findings.collecting():
            file = SourceFile(folder / name)
            shards.append((file, read_pth(file)))
    findings.raise_if_any()
    return shards


def _check_everywhere(
    shards: Sequence[tuple[SourceFile, Mapping[str, PthTensor]]], pieces: Mapping[str, Pieces]
) -> None:
    """Every tensor is in every file, in one type."""
    findings = Findings()
    for name, its in pieces.items():
        missing = [file.name for file, tensors in shards if name not in tensors]
        if missing:
            findings.add(f"{name}: in {its[0].where}, but not in {', '.join(missing)}")
        encodings = {piece.encoding: piece.where for piece in its}
        if len(encodings) > 1:
            types = ", ".join(f"{encoding} in {where}" for encoding, where in encodings.items())
            findings.add(f"{name}: of different types: {types}")
    findings.raise_if_any()


def _weight_sizes(params: Mapping[str, Any], pieces: Mapping[str, Pieces]) -> WeightSizes:
    """The vocabulary and feed-forward width of the merged weights. Raises when the tensors that tell are missing."""
    findings = Findings()
    for name in (_EMBED, _W1):
        if name not in pieces:
            findings.add(f"{name} is missing in {next(iter(pieces.values()))[0].where if pieces else 'every shard'}")
        elif len(pieces[name][0].shape) != 2:
            findings.add(f"{name}: expected two dimensions, got {list(pieces[name][0].shape)}")
    findings.raise_if_any()
    embed = pieces[_EMBED]
    dim = params.get("dim")
    by_columns = len(embed) > 1 and sum(piece.shape[-1] for piece in embed) == dim
    rows = embed[0].shape[0] if by_columns else sum(piece.shape[0] for piece in embed)
    shape = (rows, dim) if isinstance(dim, int) else embed[0].shape
    return WeightSizes(rows, sum(piece.shape[0] for piece in pieces[_W1]), _is_tied(pieces, shape))


def _is_tied(pieces: Mapping[str, Pieces], shape: tuple[int, ...]) -> bool:
    """No output head, or one that is the embedding bit for bit. Read in blocks: most heads differ in the first."""
    embed, head = pieces[_EMBED], pieces.get(_HEAD)
    if head is None:
        return True
    axes = [_axis([piece.shape for piece in its], shape) for its in (embed, head)]
    if None in axes or embed[0].encoding != head[0].encoding:
        return False  # another finding, elsewhere
    step = max(1, _COMPARED_BYTES // max(1, shape[1] * 4))
    for start in range(0, shape[0], step):
        rows = range(start, min(start + step, shape[0]))
        one, other = (_peek_rows(its, axis, rows) for its, axis in zip((embed, head), axes, strict=True))
        if one.tobytes() != other.tobytes():
            return False
    return True


def _peek_rows(pieces: Pieces, axis: int | None, rows: range) -> np.ndarray:
    """Rows of a merged matrix, apart from the forward pass over the files."""
    if len(pieces) == 1:
        return pieces[0].peek(rows.start, rows.stop)
    if axis == 1:
        return np.concatenate([piece.peek(rows.start, rows.stop) for piece in pieces], axis=1)
    parts, begin = [], 0
    for piece in pieces:
        start, stop = max(rows.start - begin, 0), min(rows.stop - begin, piece.shape[0])
        if start < stop:
            parts.append(piece.peek(start, stop))
        begin += piece.shape[0]
    return np.concatenate(parts)


def _axis(shapes: Sequence[tuple[int, ...]], expected: tuple[int, ...]) -> int | None:
    """The one axis along which pieces of these shapes add up to ``expected``, or None.

    >>> _axis([(256, 64), (256, 64)], (512, 64)), _axis([(512, 32), (512, 32)], (512, 64)), _axis([(64,)], (65,))
    (0, 1, None)
    """
    found = [
        axis
        for axis, size in enumerate(expected)
        if all(len(shape) == len(expected) for shape in shapes)
        and sum(shape[axis] for shape in shapes) == size
        and all(shape[:axis] + shape[axis + 1 :] == expected[:axis] + expected[axis + 1 :] for shape in shapes)
    ]
    return found[0] if found else None


def _merge(config: LlamaConfig, pieces: Mapping[str, Pieces]) -> dict[str, SourceTensor]:
    """Every tensor whole. Raises with one finding per tensor whose pieces do not fit or whose copies differ."""
    findings = Findings()
    # A head that is the embedding is left out: it was compared already, and nothing of it is stored.
    tensors = {name: its for name, its in pieces.items() if name != _HEAD or not config.tie_word_embeddings}
    # Tensors of no model, and those on the ignore list, stay one piece: whoever asks is told, or need not know.
    merged: dict[str, SourceTensor] = {name: its[0] for name, its in tensors.items()}
    for slot in _expected(config, len(tensors)):
        its = tensors.get(slot[0])
        if its is None or len(its) == 1:
            continue
        name, expected = slot
        shapes = [piece.shape for piece in its]
        if all(shape == expected for shape in shapes):
            with findings.collecting():
                _check_copies(name, its)
        elif (axis := _axis(shapes, expected)) is not None:
            merged[name] = _joined(its, axis, expected)
        else:
            listed = ", ".join(f"{list(piece.shape)} in {piece.where}" for piece in its)
            findings.add(f"{name}: its pieces do not add up to {list(expected)} along one axis: {listed}")
    findings.raise_if_any()
    return merged


def _expected(config: LlamaConfig, limit: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the model's tensors; none for an absurd number of layers, which is told elsewhere."""
    if config.num_layers <= limit:
        for slot in slots(config, "meta"):
            yield slot.source, slot.shape


def _check_copies(name: str, pieces: Pieces) -> None:
    """Copies in every file must agree within the tolerance. A NaN agrees with a NaN alone."""
    findings = Findings()
    rows = pieces[0].shape[0] if pieces[0].shape else 0
    first = pieces[0].peek(0, rows).astype(np.float32)
    allowed = np.maximum(np.abs(first) * (BFLOAT16_STEP if pieces[0].encoding == "BF16" else 0), NORM_TOLERANCE)
    for piece in pieces[1:]:
        other = piece.peek(0, rows).astype(np.float32)
        with np.errstate(invalid="ignore"):
            apart = np.abs(first - other)
        apart[(first == other) | (np.isnan(first) & np.isnan(other))] = 0
        # Written so that a NaN on one side alone is beyond every bound.
        if beyond := int((~(apart <= allowed)).sum()):
            findings.add(
                f"{name}: {pieces[0].where} and {piece.where} hold copies of it that differ in {beyond} values by up "
                f"to {float(apart.max()):.3g}; expected at most {NORM_TOLERANCE:g}, or one step of bfloat16"
            )
    findings.raise_if_any()


def _joined(pieces: Pieces, axis: int, shape: tuple[int, ...]) -> SourceTensor:
    """The pieces side by side along ``axis``; one of them in memory beside the whole."""
    first = pieces[0]

    def read() -> np.ndarray:
        whole = np.empty(shape, first.dtype)
        begin = 0
        for piece in pieces:
            end = begin + piece.shape[axis]
            whole[(slice(None),) * axis + (slice(begin, end),)] = piece.read()
            begin = end
        return whole

    where = f"{first.where} .. {pieces[-1].where}"
    return SourceTensor(first.encoding, first.dtype, shape, where, read, first.place)
