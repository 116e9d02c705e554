"""From documents to rows of a fixed length: several documents side by side, none of which sees another.

Every document starts at position 0 and its tokens see only what comes before them in it. :func:`columns` says so to the
very layers that serving runs.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.columns import Columns


class Document(NamedTuple):
    """Token ids, and which of them are an answer: what a served model would have said itself."""

    ids_T: np.ndarray  # int32
    answer_T: np.ndarray  # bool


class Rows(NamedTuple):
    """B rows of T tokens. A place that no document fills: segment 0, position T (outside the row: padding)."""

    tokens_BT: np.ndarray | jax.Array  # int32
    positions_BT: np.ndarray | jax.Array  # int32, within the document
    segments_BT: np.ndarray | jax.Array  # int32, 1 for the first document of a row
    answer_BT: np.ndarray | jax.Array  # bool, the token belongs to an answer


def plan(lengths: Sequence[int], row: int) -> list[list[int]]:
    """Which documents share a row of ``row`` tokens: each goes to the first row that has room, in their order.

    Deterministic, linear in the documents: only the latest 64 open rows are looked at.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (row, room)
    for index, length in enumerate(lengths):
        if not 1 <= length <= row:
            raise ValueError(f"document {index}: expected 1 to {row} tokens, got {length}")
        for place, (number, room) in enumerate(open_rows):
            if length <= room:
                rows[number].append(index)
                open_rows[place] = (number, room - length)
                break
        else:
            rows.append([index])
            open_rows.append((len(rows) - 1, row - length))
        open_rows = [entry for entry in open_rows if entry[1] > 0][-64:]
    return rows


def pack(documents: Sequence[Document], row: int) -> Rows:
    """One row [1, T] of these documents, which must fit."""
    filled = sum(len(document.ids_T) for document in documents)
    if filled > row:
        raise ValueError(f"expected at most {row} tokens in a row, got {filled}")
    tokens_T, segments_T = np.zeros((2, row), np.int32)
    positions_T = np.full((row,), row, np.int32)
    answer_T = np.zeros((row,), bool)
    starts = itertools.accumulate((len(document.ids_T) for document in documents), initial=0)
    for segment, (start, document) in enumerate(zip(starts, documents, strict=False), 1):
        place = slice(start, start + len(document.ids_T))
        tokens_T[place] = document.ids_T
        positions_T[place] = np.arange(len(document.ids_T))
        segments_T[place] = segment
        answer_T[place] = document.answer_T
    return Rows(tokens_T[None], positions_T[None], segments_T[None], answer_T[None])


def stack(rows: Sequence[Rows]) -> Rows:
    """One Rows of several."""
    return Rows(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))


def columns(segments_BT: jax.Array) -> Columns:
    """What every token of packed rows may see: itself and what comes before it in its own document."""
    T = segments_BT.shape[1]
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    order_T = jnp.arange(T)
    before_TT = order_T[None, :] < order_T[:, None]
    itself_TT = order_T[None, :] == order_T[:, None]
    return Columns((same_BTT & before_TT[None] & (segments_BT > 0)[:, :, None]) | itself_TT[None])


def ahead(values_BT: jax.Array, places: int, fill: int | bool = 0) -> jax.Array:
    """``values_BT`` of the token ``places`` further on in the row; ``fill`` past its end."""
    width = values_BT.shape[1]
    padded = jnp.pad(values_BT, ((0, 0), (0, places)), constant_values=fill)
    return jax.lax.slice_in_dim(padded, places, places + width, axis=1)


def served(rows: Rows, places: int) -> jax.Array:
    """bool [B, T]: where serving, having seen token t, would draft the token ``places`` >= 2 after it.

    Token t + 1 is then the pending one, which the target said itself: both it and what is drafted are of the answer,
    and of token t's document.
    """
    segments_BT, answer_BT = jnp.asarray(rows.segments_BT), jnp.asarray(rows.answer_BT)
    same_BT = (segments_BT > 0) & (ahead(segments_BT, places) == segments_BT)
    return same_BT & ahead(answer_BT, 1, False) & ahead(answer_BT, places, False)
