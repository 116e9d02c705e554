"""The layers of a Llama decoder as Flax NNX modules."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.cache import LayerCache, Tree, write
from jaxspec.model.columns import Columns
from jaxspec.model.config import LlamaConfig
from jaxspec.model.params import ParamSpec, layer_specs
from jaxspec.model.rope import rotate
from jaxspec.sharding import Sharding


def product(x: jax.Array, weight: jax.Array, n_in: int) -> jax.Array:
    """x [B, T, in...] times weight [out..., in...] over the last ``n_in`` axes -> float32 [B, T, out...].

    Every matrix product with parameters goes through here, so that other storage (int8) has one place to join.
    """
    rows = x.shape[0] * x.shape[1]
    out_shape, in_shape = weight.shape[: weight.ndim - n_in], weight.shape[weight.ndim - n_in :]
    # Two plain matrices: with more free or contracted axes XLA's CPU backend transposes the weight before each product.
    matrix = weight.reshape(math.prod(out_shape), math.prod(in_shape))
    x_flat = x.reshape(rows, math.prod(in_shape)).astype(weight.dtype)
    # One-row bfloat16 products leave the fast kernels of XLA's CPU backend (12x slower than two rows).
    if rows == 1 and weight.dtype == jnp.bfloat16:
        x_flat = jnp.concatenate([x_flat, jnp.zeros_like(x_flat)])
    return _matrix_product(x_flat, matrix)[:rows].reshape(*x.shape[:2], *out_shape)


@jax.custom_vjp
def _matrix_product(x_RI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """float32 [R, O]. Its gradients, too, are products of the operands' dtype with float32 sums: the derived rule would
    multiply float32 with bfloat16, which has no fast kernel anywhere."""
    return jax.lax.dot_general(x_RI, weight_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _product_forward(x_RI: jax.Array, weight_OI: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matrix_product(x_RI, weight_OI), (x_RI, weight_OI)


def _product_backward(saved: tuple[jax.Array, jax.Array], grad_RO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_RI, weight_OI = saved
    grad_RO = grad_RO.astype(weight_OI.dtype)
    to_x = jax.lax.dot_general(grad_RO, weight_OI, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    to_weight = _over_rows(grad_RO, x_RI)
    return to_x.astype(x_RI.dtype), to_weight.astype(weight_OI.dtype)


def _over_rows(x_RO: jax.Array, y_RI: jax.Array) -> jax.Array:
    """The sum over rows of outer products, float32 [O, I].

    Rows in two halves: XLA's CPU backend would read the operands of a product over a leading axis as they lie, which no
    fast kernel does; over two axes it lays them out anew first (3 to 4 times as fast in bfloat16).
    """
    halves = 2 if x_RO.shape[0] % 2 == 0 else 1
    x, y = (array.reshape(halves, -1, array.shape[1]) for array in (x_RO, y_RI))
    return jax.lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32)


_matrix_product.defvjp(_product_forward, _product_backward)


def look_up(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    """float32 rows of a table, [*ids.shape, D].

    XLA's CPU backend gathers from a float32 copy of a bfloat16 table. As a rule that copy is fused away; but in a loop
    it is the same every time and is moved out, where nothing fuses it: all of the table, for every chain of drafts.
    Behind a barrier it depends on the ids, so it stays.
    """
    if table_VD.dtype == jnp.bfloat16:
        table_VD, ids = jax.lax.optimization_barrier((table_VD, ids))
    return table_VD[ids].astype(jnp.float32)


class Linear(nnx.Module):
    """A weight [out..., in...] and its :func:`product`."""

    def __init__(self, spec: ParamSpec, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.n_in = spec.n_in
        self.weight = nnx.Param(initial_weight(spec, dtype, rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return product(x, self.weight[...], self.n_in)


def initial_weight(spec: ParamSpec, dtype: jnp.dtype, rngs: nnx.Rngs) -> jax.Array:
    """Normal weights with variance 1 / fan-in."""
    scale = 1 / math.sqrt(math.prod(spec.shape[len(spec.shape) - spec.n_in :]))
    return (scale * jax.random.normal(rngs.params(), spec.shape, jnp.float32)).astype(dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x = x_BTD.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * self.weight[...].astype(jnp.float32)[None, None, :]


def attend(q_BTKGH: jax.Array, cache: LayerCache, positions_BT: jax.Array, tree: Tree | None = None) -> jax.Array:
    """Grouped-query attention of queries at positions_BT over every slot s <= position, or what ``tree`` lets them see.

    Returns [B, T, K, G, H].
    """
    B, T, K, G, H = q_BTKGH.shape
    # Queries of one kv head form one matrix, [T * G, H], so that each product is a plain batched one.
    q = jnp.transpose(q_BTKGH, (0, 2, 1, 3, 4)).reshape(B, K, T * G, H).astype(cache.k.dtype)
    scores = jnp.einsum("bkqh,bksh->bkqs", q, cache.k, preferred_element_type=jnp.float32) / math.sqrt(H)
    if tree is None:
        visible_BTS = jnp.arange(cache.k.shape[2])[None, None, :] <= positions_BT[:, :, None]
    elif tree.recent_BTW is not None:
        return attend_by_position(q.reshape(B, K, T, G, H), scores.reshape(B, K, T, G, -1), cache, tree.recent_BTW)
    else:
        visible_BTS = tree.visible(cache.k.shape[2])
    scores = scores.reshape(B, K, T, G, -1)
    scores = jnp.where(visible_BTS[:, None, :, None, :], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).reshape(B, K, T * G, -1).astype(cache.v.dtype)
    out = jnp.einsum("bkqs,bksh->bkqh", weights, cache.v, preferred_element_type=jnp.float32)
    return jnp.transpose(out.reshape(B, K, T, G, H), (0, 2, 1, 3, 4))


def attend_by_position(
    q_BKTGH: jax.Array, scores_BKTGS: jax.Array, cache: LayerCache, recent_BTW: jax.Array
) -> jax.Array:
    """Attention over slots = positions before the recent ones, and over those one by one (``Tree.by_position``).

    So every sum has its terms in the order of position, whichever slots the nodes of the tree have.
    """
    B, K, T, _, H = q_BKTGH.shape
    S, W = cache.k.shape[2], recent_BTW.shape[2]
    at_BX = jnp.clip(recent_BTW, 0, S - 1).reshape(B, T * W)

    def recent(array_BKSH: jax.Array) -> jax.Array:
        return jax.vmap(lambda row_KSH, at_X: row_KSH[:, at_X])(array_BKSH, at_BX).reshape(B, K, T, W, H)

    near_BKTGW = jnp.einsum("bktgh,bktwh->bktgw", q_BKTGH, recent(cache.k), preferred_element_type=jnp.float32)
    far_BTS = jnp.arange(S)[None, None, :] < recent_BTW[:, :, :1]
    scores = jnp.concatenate(
        [
            jnp.where(far_BTS[:, None, :, None, :], scores_BKTGS, -jnp.inf),
            jnp.where((recent_BTW >= 0)[:, None, :, None, :], near_BKTGW / math.sqrt(H), -jnp.inf),
        ],
        axis=-1,
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(cache.v.dtype)
    far = weights[..., :S].reshape(B, K, -1, S)
    out = jnp.einsum("bkqs,bksh->bkqh", far, cache.v, preferred_element_type=jnp.float32).reshape(q_BKTGH.shape)
    out += jnp.einsum("bktgw,bktwh->bktgh", weights[..., S:], recent(cache.v), preferred_element_type=jnp.float32)
    return jnp.transpose(out, (0, 2, 1, 3, 4))


def attention(
    qkv: jax.Array,
    cache: LayerCache,
    positions_BT: jax.Array,
    tree: Tree | Columns | None,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, LayerCache]:
    """Rotates queries and keys, writes keys and values, attends. ``qkv``: [B, T, K, G + 2, H], as the weight has it."""
    groups = qkv.shape[3] - 2
    qk = rotate(qkv[:, :, :, : groups + 1], cos, sin)
    q, k, v = qk[:, :, :, :groups], qk[:, :, :, groups], qkv[:, :, :, groups + 1]
    if isinstance(tree, Columns):
        cache = tree.grown(cache, k, v)
        return tree.attend(q, cache), cache
    slots_BT = positions_BT if tree is None else tree.slots(positions_BT, cache.k.shape[2])
    cache = LayerCache(write(cache.k, k, slots_BT), write(cache.v, v, slots_BT))
    return attend(q, cache, positions_BT, tree), cache


def swiglu(gate_up: jax.Array) -> jax.Array:
    """silu(gate) * up of [B, T, F, 2]."""
    return jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1]


class DecoderLayer(nnx.Module):
    """Attention and SwiGLU, each with a pre-norm and a residual. The residual stream is float32."""

    def __init__(self, config: LlamaConfig, sharding: Sharding, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        specs = layer_specs(config)
        self.sharding = sharding
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.qkv = Linear(specs["qkv"], dtype, rngs)
        self.o = Linear(specs["o"], dtype, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.gate_up = Linear(specs["gate_up"], dtype, rngs)
        self.down = Linear(specs["down"], dtype, rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        cache: LayerCache,
        positions_BT: jax.Array,
        tree: Tree | Columns | None,
        cos: jax.Array,
        sin: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        attended, cache = attention(self.qkv(self.attn_norm(x_BTD)), cache, positions_BT, tree, cos, sin)
        x_BTD = x_BTD + self._whole(self.o(attended))
        return x_BTD + self._whole(self.down(swiglu(self.gate_up(self.mlp_norm(x_BTD))))), cache

    def _whole(self, x_BTD: jax.Array) -> jax.Array:
        """The sum over the model axis: the only two collectives of a layer."""
        return self.sharding.constrain(x_BTD, "batch", "tokens", "embed")
