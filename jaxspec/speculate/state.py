"""Everything that decoding knows, as one frozen pytree, and the small report that a step sends to the host.

A row (slot) with committed length n has n tokens in ``tokens_BS``; the target cache holds n - 1 valid slots (all but
the pending token, the last committed one). Rows are independent: nothing of one depends on another or on its slot.
"""

import dataclasses
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.cache import KVCache, LayerCache
from jaxspec.speculate.sampling import RowSampling

STOP_IDS: Final = 64  # E: stop-token ids of a row (the model's end tokens and the request's own)
TOP_LOGPROBS: Final = 8  # alternatives reported per token when a row asks for log-probabilities

# Why a row finished, and what went wrong in it: codes that cross the jit, with their sentences.
RUNNING, STOPPED, LENGTH = 0, 1, 2
FAULTS: Final = (
    "",
    "the target's logits are not finite",
    "the cache length differs from the committed length",
)
NOT_FINITE, DESYNC = 1, 2


class RowParams(NamedTuple):
    """What a request fixes for its row."""

    sampling: RowSampling
    seed_B2: jax.Array  # uint32
    stop_ids_BE: jax.Array  # int32, padded with -1
    min_length_B: jax.Array  # stop tokens are banned below this committed length
    max_length_B: jax.Array  # the row finishes with "length" here
    wants_logprobs_B: jax.Array  # bool
    lookup_min_B: jax.Array  # int32, shortest suffix of the row that a lookup goes by, tokens
    lookup_max_B: jax.Array  # int32, longest one


class DecodeState(NamedTuple):
    """One value per moment of decoding; a step swaps it for the next. B rows, S slots."""

    tokens_BS: jax.Array  # int32
    length_B: jax.Array  # int32, committed tokens; 0 in an empty row
    finished_B: jax.Array  # bool; True in an empty row
    rows: RowParams
    target: KVCache
    drafter: Any  # the drafter's own pytree

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        return self.tokens_BS.shape  # pyright: ignore[reportReturnType]


class Context(NamedTuple):
    """What a drafter may see of the rows.

    ``asked_B``: levels of drafts that the round wants of each row, int32, 0 for a row at rest; only ``propose`` knows.
    """

    tokens_BS: jax.Array
    length_B: jax.Array
    rows: RowParams
    asked_B: jax.Array | None = None


class Logprobs(NamedTuple):
    """Of the tokens of a step under the target's unfiltered law; zeros unless a row asked."""

    chosen_BE: jax.Array  # float32
    top_BEC: jax.Array  # float32, most probable first
    top_ids_BEC: jax.Array  # int32


class StepReport(NamedTuple):
    """What the host needs to know of a step: ``packed`` is the one array it reads unless log-probabilities are due."""

    packed: jax.Array  # int32 [B, len(fields) + D + 1], see HostReport
    logprobs: Logprobs


@dataclasses.dataclass(frozen=True)
class HostReport:
    """``StepReport.packed`` by name, as numpy arrays. n_new counts committed tokens, the first n_new of tokens."""

    n_new: np.ndarray
    n_drafted: np.ndarray
    n_accepted: np.ndarray  # as the law said, before a stop cut the run
    bonus: np.ndarray  # 1 where no draft came after the accepted ones: nothing was rejected
    finish: np.ndarray
    fault: np.ndarray
    length: np.ndarray  # committed length after the step
    ready: np.ndarray  # how many levels the drafter could draft next
    lag: np.ndarray  # committed tokens, the pending one aside, that the drafter has not taken in
    tokens: np.ndarray  # [B, D + 1]

    @classmethod
    def read(cls, report: StepReport) -> "HostReport":
        """Waits for the step and copies the packed array."""
        packed = np.asarray(report.packed)
        count = len(dataclasses.fields(cls)) - 1
        columns = {field.name: packed[:, index] for index, field in enumerate(dataclasses.fields(cls)[:count])}
        return cls(**columns, tokens=packed[:, count:])


def pack(
    *,
    n_new: jax.Array,
    n_drafted: jax.Array,
    n_accepted: jax.Array,
    bonus: jax.Array,
    finish: jax.Array,
    fault: jax.Array,
    length: jax.Array,
    ready: jax.Array,
    lag: jax.Array,
    tokens: jax.Array,
) -> jax.Array:
    """The inverse of :meth:`HostReport.read`, inside the step."""
    columns = [n_new, n_drafted, n_accepted, bonus, finish, fault, length, ready, lag]
    return jnp.concatenate([*(column.astype(jnp.int32)[:, None] for column in columns), tokens], axis=1)


def grow_cache(cache: KVCache, slots: int) -> KVCache:
    """The same cache with more, zeroed slots."""

    def grow(array_BKSH: jax.Array) -> jax.Array:
        return jnp.pad(array_BKSH, ((0, 0), (0, 0), (0, slots - array_BKSH.shape[2]), (0, 0)))

    return KVCache(tuple(LayerCache(grow(layer.k), grow(layer.v)) for layer in cache.layers), cache.length_B)
