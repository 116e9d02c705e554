"""What of a verdict becomes text: the accepted run, cut at the first stop or at the row's end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.speculate.judge import Judged
from jaxspec.speculate.state import LENGTH, RUNNING, STOPPED, Context


class Appended(NamedTuple):
    """The rows afterwards. Those with a fault commit nothing."""

    tokens_BS: jax.Array
    length_B: jax.Array
    n_new_B: jax.Array
    finish_B: jax.Array
    committing_B: jax.Array  # bool


def append(before: Context, judged: Judged, active_B: jax.Array) -> Appended:
    """Writes each row's run behind its committed tokens, as far as nothing ends it."""
    rows, n_B = before.rows, before.length_B
    slots = before.tokens_BS.shape[1]
    offsets_E = jnp.arange(judged.tokens_BE.shape[1], dtype=jnp.int32)[None, :]

    committing_B = active_B & (judged.fault_B == 0)
    run_BE = (offsets_E <= judged.n_accepted_B[:, None]) & committing_B[:, None]
    stops_BE = jnp.any(judged.tokens_BE[:, :, None] == rows.stop_ids_BE[:, None, :], axis=-1) & run_BE
    full_BE = (n_B[:, None] + offsets_E + 1 >= rows.max_length_B[:, None]) & run_BE
    # Kept: the run up to and with its first ending.
    ended_before_BE = jnp.cumsum((stops_BE | full_BE).astype(jnp.int32), axis=1) - (stops_BE | full_BE)
    kept_BE = run_BE & (ended_before_BE == 0)
    n_new_B = jnp.sum(kept_BE, axis=1, dtype=jnp.int32)
    stopped_B = jnp.any(stops_BE & kept_BE, axis=1)
    full_B = jnp.any(full_BE & kept_BE, axis=1)
    finish_B = jnp.where(stopped_B, STOPPED, jnp.where(full_B, LENGTH, RUNNING))
    # Dropped writes: an index past the end.
    where_BE = jnp.where(kept_BE, n_B[:, None] + offsets_E, slots)
    tokens_BS = jax.vmap(lambda row_S, at_E, new_E: row_S.at[at_E].set(new_E, mode="drop"))(
        before.tokens_BS, where_BE, judged.tokens_BE
    )
    return Appended(tokens_BS, n_B + n_new_B, n_new_B, finish_B, committing_B)
