"""Heads at the NNX boundary: the static half, and where each parameter lives (as ``ModelDef`` is for models)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.boundary import flat_params, merge
from jaxspec.model.cache import KVCache, empty_cache
from jaxspec.model.heads.config import EagleConfig, HeadsConfig, MedusaConfig
from jaxspec.model.heads.eagle import EagleHead
from jaxspec.model.heads.medusa import MedusaHeads
from jaxspec.model.heads.params import INDEX_LEAVES, heads_param_specs
from jaxspec.sharding import Sharding


class HeadsDef(NamedTuple):
    """The static half of heads (NNX graph definition) and how their parameters are named and laid out."""

    config: HeadsConfig
    sharding: Sharding
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    graphdef: Any
    abstract: Any  # nnx.State of ShapeDtypeStructs

    def merge(self, params: Mapping[str, jax.Array]) -> Any:
        """The MedusaHeads or EagleHead over these parameters (inside a jit)."""
        return merge(self.graphdef, self.abstract, params)

    def shardings(self) -> dict[str, jax.sharding.NamedSharding]:
        """Where each parameter lives, by name."""
        specs = heads_param_specs(self.config)
        return {name: self.sharding.named(spec.axes, spec.shape) for name, spec in specs.items()}

    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the parameters, for lowering without weights."""
        shardings = self.shardings()
        return {
            name: jax.ShapeDtypeStruct(
                spec.shape, jnp.dtype(jnp.int32) if name in INDEX_LEAVES else self.dtype, sharding=shardings[name]
            )
            for name, spec in heads_param_specs(self.config).items()
        }

    def empty_cache(self, rows: int, slots: int) -> KVCache:
        """The zeroed cache of an EAGLE head, one layer (inside a jit). Medusa heads have none: ValueError."""
        if not isinstance(self.config, EagleConfig):
            raise ValueError("Medusa heads have no cache")
        return empty_cache(self.config.decoder, self.sharding, rows, slots, self.cache_dtype)


def define_heads(
    config: HeadsConfig, sharding: Sharding, dtype: jnp.dtype, cache_dtype: jnp.dtype | None = None
) -> HeadsDef:
    """Builds the module abstractly (no memory) and splits it at the NNX boundary. Caches: ``dtype`` unless given."""
    module = nnx.eval_shape(lambda: _module(config, sharding, dtype, 0))
    graphdef, abstract = nnx.split(module)
    return HeadsDef(config, sharding, dtype, cache_dtype or dtype, graphdef, abstract)


def random_heads(heads: HeadsDef, seed: int) -> dict[str, jax.Array]:
    """Randomly initialised parameters in their shardings."""
    return flat_params(_module(heads.config, heads.sharding, heads.dtype, seed), heads.shardings())


def _module(config: HeadsConfig, sharding: Sharding, dtype: jnp.dtype, seed: int) -> MedusaHeads | EagleHead:
    rngs = nnx.Rngs(seed)
    if isinstance(config, MedusaConfig):
        return MedusaHeads(config, sharding, dtype, rngs)
    return EagleHead(config, sharding, dtype, rngs)
