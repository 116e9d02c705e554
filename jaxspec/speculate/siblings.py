"""Drawing the children of a tree whose shape is fixed: without replacement below a node, independently below others."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.shapes import sizes
from jaxspec.speculate.sampling import BLOCK, blocks, first_argmax, first_past


def draw_siblings(q_BDV: jax.Array, parents: Sequence[int], depths: Sequence[int], uniform_BJ: jax.Array) -> jax.Array:
    """tokens_BJ int32: draft j is drawn from the law of its depth without its earlier siblings, renormalised.

    Args:
        q_BDV: the laws of depths 1..D, which know nothing of the drafts above (Medusa's do not).
        parents, depths: of every draft, static; siblings in draw order.
        uniform_BJ: one number in [0, 1) per draft. Independent ones make cousins independent, which the block law
            needs: it looks at children of several nodes of one depth, where the token law follows one path.

    One uniform per draft inverts the cumulative sum of what is left, as ``sampling.draw`` does, and only the block that
    a draft was taken from is summed anew: one pass over each law, whatever the number of drafts. Where a law has no
    token left, the draft is an id of q = 0, which no law lets stand.
    """
    size = sizes(q_BDV=q_BDV, uniform_BJ=uniform_BJ)
    rows = size["B"]
    children: dict[int, list[int]] = {}
    for j, parent in enumerate(parents):
        children.setdefault(parent, []).append(j)
    families = list(children.values())
    level_F = np.array([depths[family[0]] - 1 for family in families])

    laws_BDRC = blocks(q_BDV, 0)
    mass_BFR = jnp.sum(laws_BDRC, axis=-1)[:, level_F]
    iota_R = lax.iota(jnp.int32, laws_BDRC.shape[2])[None, None, :]
    iota_C = lax.iota(jnp.int32, BLOCK)[None, None, :]
    spare_BD = lax.cond(
        jnp.any(jnp.sum(q_BDV > 0, axis=-1) < max(map(len, families))),
        lambda: first_argmax(jnp.where(q_BDV > 0, 0.0, 1.0)),
        lambda: jnp.zeros(q_BDV.shape[:2], jnp.int32),
    )
    pick = jax.vmap(jax.vmap(lambda law_RC, block: law_RC[block]))
    drawn: list[jax.Array] = [jnp.zeros((rows,), jnp.int32)] * len(parents)
    for order in range(max(map(len, families))):
        large = np.array([f for f, family in enumerate(families) if len(family) > order])
        mine = [families[f][order] for f in large]
        level_X = level_F[large]
        mass_BXR = mass_BFR[:, large]
        upto_BXR = jnp.cumsum(mass_BXR, axis=-1)
        point_BX = uniform_BJ[:, np.array(mine)].astype(q_BDV.dtype) * upto_BXR[..., -1]
        block_BX = first_past(mass_BXR, upto_BXR, point_BX)
        before_BX = jnp.take_along_axis(upto_BXR - mass_BXR, block_BX[..., None], axis=-1)[..., 0]
        law_BXC = pick(laws_BDRC[:, level_X], block_BX)
        ids_BXC = block_BX[..., None] * BLOCK + iota_C
        for earlier in range(order):
            taken_BX = jnp.stack([drawn[families[f][earlier]] for f in large], axis=1)
            law_BXC = jnp.where(ids_BXC == taken_BX[..., None], 0, law_BXC)
        place_BX = first_past(law_BXC, jnp.cumsum(law_BXC, axis=-1), point_BX - before_BX)
        left_BX = jnp.sum(jnp.where(iota_C == place_BX[..., None], 0, law_BXC), axis=-1)
        mass_BXR = jnp.where(iota_R == block_BX[..., None], left_BX[..., None], mass_BXR)
        mass_BFR = mass_BFR.at[:, large].set(mass_BXR)
        token_BX = jnp.where(upto_BXR[..., -1] > 0, block_BX * BLOCK + place_BX, spare_BD[:, level_X])
        for x, j in enumerate(mine):
            drawn[j] = token_BX[:, x]
    return jnp.stack(drawn, axis=1)
