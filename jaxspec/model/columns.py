"""Attention of a head that is unrolled over whole rows at once: how training feeds it its own outputs."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.model.cache import LayerCache


class Columns(NamedTuple):
    """T columns of a packed row. Token t of the first pass sees the tokens before it that ``above_BTT`` names; in each
    later pass token t sees the same and what the later passes put into its own column, itself last.

    A tree of T nodes per pass says the same (``Tree``), with scores for all pairs of columns in every pass.
    """

    above_BTT: jax.Array  # bool, [b, t, s]: token t of the first pass sees its token s; itself is among them

    def grown(self, cache: LayerCache, k_BTKH: jax.Array, v_BTKH: jax.Array) -> LayerCache:
        """The cache [B, K, passes * T, H] with another pass behind its last; it begins with no slots."""

        def join(old_BKSH: jax.Array, new_BTKH: jax.Array) -> jax.Array:
            return jnp.concatenate([old_BKSH, new_BTKH.swapaxes(1, 2).astype(old_BKSH.dtype)], axis=2)

        return LayerCache(join(cache.k, k_BTKH), join(cache.v, v_BTKH))

    def attend(self, q_BTKGH: jax.Array, cache: LayerCache) -> jax.Array:
        """Grouped-query attention over the first pass, a matrix of scores, and over a column, a few: [B, T, K, G, H].

        One softmax over both: what is added up is divided once, at the end.
        """
        B, T, K, G, H = q_BTKGH.shape
        q = (q_BTKGH.swapaxes(1, 2) / math.sqrt(H)).astype(cache.k.dtype)  # [B, K, T, G, H]
        q_far = q.reshape(B, K, T * G, H)
        far = jnp.einsum("bkqh,bksh->bkqs", q_far, cache.k[:, :, :T], preferred_element_type=jnp.float32)
        far = far.reshape(B, K, T, G, T)
        far = jnp.where(self.above_BTT[:, None, :, None, :], far, -jnp.inf)
        own_k, own_v = (x[:, :, T:].reshape(B, K, -1, T, H).astype(jnp.float32) for x in cache)
        near = jnp.sum(q[:, :, None].astype(jnp.float32) * own_k[:, :, :, :, None], axis=-1)  # [B, K, passes, T, G]
        most = jnp.max(far, axis=-1)
        if near.shape[2]:
            most = jnp.maximum(most, jnp.max(near, axis=2))
        most = jax.lax.stop_gradient(most)
        far = jnp.exp(far - most[..., None])
        near = jnp.exp(near - most[:, :, None])
        total = jnp.sum(far, axis=-1) + jnp.sum(near, axis=2)  # [B, K, T, G]
        far = far.reshape(B, K, T * G, T).astype(cache.v.dtype)
        out = jnp.einsum("bkqs,bksh->bkqh", far, cache.v[:, :, :T], preferred_element_type=jnp.float32)
        out = out.reshape(B, K, T, G, H) + jnp.sum(near[..., None] * own_v[:, :, :, :, None], axis=2)
        return (out / total[..., None]).swapaxes(1, 2)
