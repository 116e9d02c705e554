"""Documents on disk as token ids, and the rows that a run sees, in an order that depends on a seed alone.

A corpus is built once per data, tokenizer and row length, beside the run: ids and masks lie in flat files that are
memory-mapped, so memory holds an index of the documents and the rows of a step, whatever the size of the data.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grain
import numpy as np

from jaxspec.errors import UserError
from jaxspec.staging import StagedFolder
from jaxspec.text import Tokenizer
from train_heads.documents import Line, document_of, file_sha256, read_lines
from train_heads.packing import Document, Rows, pack, plan, stack

META: Final = "corpus.json"
SKIPPED: Final = "skipped"  # the key of a line that generate-data left for a prompt without an answer


@dataclasses.dataclass(frozen=True)
class Built:
    """What a corpus was built from, and what came of it."""

    data_sha256: str
    tokenizer: str | None
    vocab: int
    row: int
    documents: int
    tokens: int
    cut: int  # documents that were longer than a row; their rest is left out
    without_answer: int  # left out


class Corpus:
    """Documents by number. ``counts_V``: how often each id is said in answers, over all documents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.built = Built(**json.loads((folder / META).read_text()))
        self.ends_N = np.load(folder / "ends.npy")
        self.counts_V = np.load(folder / "counts.npy")
        self._ids = np.memmap(folder / "ids.i32", np.int32, "r")
        self._answer = np.memmap(folder / "answer.u8", np.uint8, "r")

    def __len__(self) -> int:
        return len(self.ends_N)

    def __getitem__(self, index: int) -> Document:
        start, end = int(self.ends_N[index - 1]) if index else 0, int(self.ends_N[index])
        return Document(np.array(self._ids[start:end]), self._answer[start:end].astype(bool))

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.ends_N, prepend=0)

    @classmethod
    def open(cls, folder: Path, data: str | Path, tokenizer: Tokenizer | None, vocab: int, row: int) -> "Corpus":
        """Builds the corpus unless ``folder`` has it. UserError names the line that is no document, or says that the
        folder has another corpus."""
        key = {
            "data_sha256": file_sha256(data),
            "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
            "vocab": vocab,
            "row": row,
        }
        if (folder / META).is_file():
            found = cls(folder)
            other = [name for name, value in key.items() if getattr(found.built, name) != value]
            if other:
                # Not built anew: checkpoints and features beside it are of these very rows.
                raise UserError(f"{folder}: was built from another {', '.join(other)}; give another --out")
            return found
        stage = StagedFolder(folder)
        stage.create()
        try:
            _build(stage.path, data, tokenizer, vocab, row, key)
            stage.publish()
        finally:
            stage.discard()
        return cls(folder)


def _build(
    folder: Path, data: str | Path, tokenizer: Tokenizer | None, vocab: int, row: int, key: dict[str, Any]
) -> None:
    ends: list[int] = []
    counts_V = np.zeros((vocab,), np.int64)
    total = cut = without = 0
    with (folder / "ids.i32").open("wb") as ids, (folder / "answer.u8").open("wb") as answers:
        for line in read_lines(data):
            if SKIPPED in line.data:
                continue
            document = _fitted(document_of(line, tokenizer, vocab), line)
            cut += len(document.ids_T) > row
            document = Document(document.ids_T[:row], document.answer_T[:row])
            if not document.answer_T.any():
                without += 1
                continue
            ids.write(document.ids_T.tobytes())
            answers.write(document.answer_T.tobytes())
            counts_V += np.bincount(document.ids_T[document.answer_T], minlength=vocab)
            total += len(document.ids_T)
            ends.append(total)
    if not ends:
        raise UserError(f"{data}: expected at least one document with an answer, got none")
    np.save(folder / "ends.npy", np.array(ends, np.int64))
    np.save(folder / "counts.npy", counts_V)
    built = Built(documents=len(ends), tokens=total, cut=cut, without_answer=without, **key)
    (folder / META).write_text(json.dumps(dataclasses.asdict(built), indent=1))


def _fitted(document: Document, line: Line) -> Document:
    if not len(document.ids_T):
        raise UserError(f"{line.where}: expected at least one token, got none")
    return document


@dataclasses.dataclass(frozen=True)
class RowSource:
    """Packed rows by number (what grain calls a random-access source)."""

    corpus: Corpus
    plans: Sequence[Sequence[int]]  # documents of each row
    row: int

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: Any) -> tuple[int, Rows]:
        index = int(index)
        return index, pack([self.corpus[document] for document in self.plans[index]], self.row)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows [B, T], and which they are."""

    numbers: tuple[int, ...]
    rows: Rows

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Rows]]) -> "Batch":
        return cls(tuple(number for number, _ in parts), stack([rows for _, rows in parts]))


def split(corpus: Corpus, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """(trained on, held out) documents: each by its own draw, so that one more document moves no other."""
    out_N = np.array([_draw(seed, index) < held_out for index in range(len(corpus))])
    if held_out and not out_N.any():
        out_N[-1] = len(corpus) > 1
    return np.flatnonzero(~out_N).tolist(), np.flatnonzero(out_N).tolist()


def _draw(seed: int, index: int) -> float:
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "big") / 2**32


def row_source(corpus: Corpus, documents: Sequence[int], row: int) -> RowSource:
    """The documents packed into rows, in their order."""
    lengths = corpus.lengths_N[list(documents)].tolist() if len(documents) else []
    return RowSource(corpus, [[documents[i] for i in part] for part in plan(lengths, row)], row)


def batches(source: RowSource, rows: int, seed: int) -> grain.MapDataset[Batch]:
    """``batches(..)[step]``: what step number ``step`` sees. Every epoch has another order, all by the seed alone."""
    return grain.MapDataset.source(source).seed(seed).shuffle().repeat().batch(rows, batch_fn=Batch.of)


def in_order(source: RowSource, rows: int, limit: int | None = None) -> list[range]:
    """Numbers of rows, ``rows`` at a time; a last part that is smaller is filled up by :func:`padded`."""
    count = len(source) if limit is None else min(limit, len(source))
    return [range(start, min(start + rows, count)) for start in range(0, count, rows)]


def padded(source: RowSource, numbers: Sequence[int], rows: int) -> Batch:
    """These rows and as many empty ones as make up ``rows``: one shape, so one program."""
    batch = Batch.of([source[number] for number in numbers])
    missing = rows - len(numbers)
    empty = Rows(*(np.zeros((missing, source.row), array.dtype) for array in batch.rows))
    empty = empty._replace(positions_BT=np.full((missing, source.row), source.row, np.int32))
    return Batch(batch.numbers, stack([batch.rows, empty]) if missing else batch.rows)
