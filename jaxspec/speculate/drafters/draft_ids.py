"""Masks over a draft vocabulary: what the target's law excludes is excluded among the draft's own ids."""

import jax
import jax.numpy as jnp

from jaxspec.model.heads.parts import TargetIds
from jaxspec.speculate.sampling import mask_logits
from jaxspec.speculate.state import RowParams


def mask_draft_logits(
    logits_BTN: jax.Array, target_ids: TargetIds | None, rows: RowParams, ban_BT: jax.Array, valid_vocab: int
) -> jax.Array:
    """``sampling.mask_logits`` over draft ids. ``target_ids``: which ids of the target they are; None: the same."""
    if target_ids is None:
        return mask_logits(logits_BTN, rows.stop_ids_BE, ban_BT, valid_vocab)
    ids_N = target_ids.weight[...]
    logits_BTN = jnp.where((ids_N >= valid_vocab)[None, None, :], -jnp.inf, logits_BTN)

    def banned(logits_BTN: jax.Array) -> jax.Array:
        stops_BN = jnp.any(rows.stop_ids_BE[:, :, None] == ids_N[None, None, :], axis=1)
        return jnp.where(stops_BN[:, None, :] & ban_BT[:, :, None], -jnp.inf, logits_BTN)

    return jax.lax.cond(jnp.any(ban_BT), banned, lambda logits_BTN: logits_BTN, logits_BTN)
