"""The Llama decoder: token ids in, hidden states and logits out."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.boundary import flat_params, merge
from jaxspec.model.cache import KVCache, LayerCache, Tree
from jaxspec.model.columns import Columns
from jaxspec.model.config import LlamaConfig
from jaxspec.model.layers import DecoderLayer, Linear, RMSNorm, initial_weight, look_up, product
from jaxspec.model.params import ParamSpec, param_specs
from jaxspec.model.rope import inverse_frequencies, rotation
from jaxspec.sharding import Sharding


class Output(NamedTuple):
    """What a pass returns: hidden_BTD after the final norm, the cache with the new tokens written, and the taps.

    ``taps_BTX``: the residual stream entering each tapped layer, side by side, float32; None without taps.
    """

    hidden_BTD: jax.Array
    cache: KVCache
    taps_BTX: jax.Array | None


class Embedding(nnx.Module):
    """The token table [V, D]; also the head of a model with tied embeddings."""

    def __init__(self, spec: ParamSpec, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(initial_weight(spec, dtype, rngs))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return look_up(self.weight[...], tokens_BT)


class Llama(nnx.Module):
    """A Llama-family decoder with unrolled layers; parameters as declared in ``params.py``."""

    def __init__(self, config: LlamaConfig, sharding: Sharding, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        specs = param_specs(config)
        self.config = config
        self.sharding = sharding
        self.embed = Embedding(specs["embed"], dtype, rngs)
        self.layers = nnx.List([DecoderLayer(config, sharding, dtype, rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(specs["lm_head"], dtype, rngs)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: KVCache,
        tree: Tree | Columns | None = None,
        taps: tuple[int, ...] = (),
    ) -> Output:
        """One pass over tokens_BT at positions_BT of each row, a chain unless ``tree`` says otherwise.

        A position outside [0, S) marks padding: nothing is written there and its output means nothing. ``taps``: the
        layers (0-based, ascending) whose input is wanted. The caller decides how many of the written tokens are valid,
        so ``cache.length_B`` passes through unchanged.
        """
        tokens_BT = jnp.clip(tokens_BT, 0, self.config.vocab_size - 1)
        x = self.sharding.constrain(self.embed(tokens_BT), "batch", "tokens", "embed")
        cos, sin = rotation(inverse_frequencies(self.config), positions_BT)
        layers, tapped = [], []
        for index, (layer, layer_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            if index in taps:
                tapped.append(x)
            x, layer_cache = _run_layer(*nnx.split(layer), x, layer_cache, positions_BT, tree, cos, sin)
            layers.append(layer_cache)
        taps_BTX = jnp.concatenate(tapped, axis=-1) if tapped else None
        return Output(self.final_norm(x), KVCache(tuple(layers), cache.length_B), taps_BTX)

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """float32 [B, T, V], whole on every device: the laws judge them once, identically everywhere."""
        head = self.embed if self.config.tie_word_embeddings else self.lm_head
        return self.sharding.constrain(product(hidden_BTD, head.weight[...], 1), None, None, None)


@partial(jax.jit, static_argnums=0)
def _run_layer(graphdef: Any, state: Any, *arguments: Any) -> tuple[jax.Array, LayerCache]:
    """A layer as a function of its own: traced and lowered once per program, not once per layer."""
    return nnx.merge(graphdef, state)(*arguments)


class ModelDef(NamedTuple):
    """The static half of a model (NNX graph definition) and how its parameters are named and laid out.

    Parameters travel as a flat dict by dotted name, the cheapest pytree to hand to a jitted call. The caches have a
    dtype of their own; docs/decisions/cache-layout.md says why.
    """

    config: LlamaConfig
    sharding: Sharding
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    graphdef: Any
    abstract: Any  # nnx.State of ShapeDtypeStructs

    def merge(self, params: Mapping[str, jax.Array]) -> Llama:
        """The module over these parameters (inside a jit)."""
        return merge(self.graphdef, self.abstract, params)

    def shardings(self) -> dict[str, jax.sharding.NamedSharding]:
        """Where each parameter lives, by name."""
        return {name: self.sharding.named(spec.axes, spec.shape) for name, spec in param_specs(self.config).items()}

    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtype and shardings of the parameters, for lowering without weights."""
        shardings = self.shardings()
        return {
            name: jax.ShapeDtypeStruct(spec.shape, self.dtype, sharding=shardings[name])
            for name, spec in param_specs(self.config).items()
        }


def define(config: LlamaConfig, sharding: Sharding, dtype: jnp.dtype, cache_dtype: jnp.dtype | None = None) -> ModelDef:
    """Builds the module abstractly (no memory) and splits it at the NNX boundary. Caches: ``dtype`` unless given."""
    module = nnx.eval_shape(lambda: Llama(config, sharding, dtype, nnx.Rngs(0)))
    graphdef, abstract = nnx.split(module)
    return ModelDef(config, sharding, dtype, cache_dtype or dtype, graphdef, abstract)


def random_params(model: ModelDef, seed: int) -> dict[str, jax.Array]:
    """Randomly initialised parameters in their shardings."""
    module = Llama(model.config, model.sharding, model.dtype, nnx.Rngs(seed))
    return flat_params(module, model.shardings())
