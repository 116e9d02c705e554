"""Medusa heads: residual blocks and an LM head each, all on the same hidden state (Cai et al. 2024, Medusa-1)."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.heads.config import MedusaConfig
from jaxspec.model.heads.params import heads_param_specs
from jaxspec.model.heads.parts import TargetIds, TargetTables, Vector
from jaxspec.model.layers import Linear
from jaxspec.sharding import Sharding


class MedusaHead(nnx.Module):
    """One head. Block j is in the attributes ``block<j>`` and ``block<j>_bias``: they name its parameters."""

    def __init__(self, config: MedusaConfig, head: int, sharding: Sharding, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        specs = heads_param_specs(config)
        self.num_layers = config.num_layers
        self.sharding = sharding
        for block in range(config.num_layers):
            setattr(self, f"block{block}", Linear(specs[f"heads.{head}.block{block}"], dtype, rngs))
            setattr(self, f"block{block}_bias", Vector(config.hidden_size, dtype))
        self.lm_head = Linear(specs[f"heads.{head}.lm_head"], dtype, rngs) if config.own_lm_head else None

    def __call__(self, hidden_BTD: jax.Array, target: TargetTables) -> jax.Array:
        x_BTD = hidden_BTD.astype(jnp.float32)
        for block in range(self.num_layers):
            linear, bias = getattr(self, f"block{block}"), getattr(self, f"block{block}_bias")
            x_BTD = x_BTD + jax.nn.silu(bias.add(linear(x_BTD)))
        if self.lm_head is None:
            return target.logits(x_BTD)
        return self.sharding.constrain(self.lm_head(x_BTD), None, None, None)


class MedusaHeads(nnx.Module):
    """All M heads over parameters as declared in ``params.py``."""

    def __init__(self, config: MedusaConfig, sharding: Sharding, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        specs = heads_param_specs(config)
        self.config = config
        self.sharding = sharding
        self.heads = nnx.List([MedusaHead(config, head, sharding, dtype, rngs) for head in range(config.num_heads)])
        self.lm_head = Linear(specs["lm_head"], dtype, rngs) if "lm_head" in specs else None
        self.target_ids = TargetIds(specs["target_ids"].shape[0]) if config.reduced_vocab else None

    def __call__(self, hidden_BTD: jax.Array, target: TargetTables) -> jax.Array:
        """float32 [M, B, T, V], whole on every device: what head i thinks of the token i + 2 places after each one.

        ``hidden_BTD`` is the target's hidden state after its final norm. V is the draft's vocabulary.
        """
        return jnp.stack(self.first(len(self.heads), hidden_BTD, target))

    def first(self, count: int, hidden_BTD: jax.Array, target: TargetTables) -> list[jax.Array]:
        """What the first ``count`` heads say, each as in a call."""
        if self.lm_head is not None:
            target = target._replace(logits=self._shared_logits)
        return [head(hidden_BTD, target) for head in list(self.heads)[:count]]

    def _shared_logits(self, hidden_BTD: jax.Array) -> jax.Array:
        assert self.lm_head is not None
        return self.sharding.constrain(self.lm_head(hidden_BTD), None, None, None)

    def to_target(self, draft_ids: jax.Array) -> jax.Array:
        """Target ids of draft ids, any shape."""
        return draft_ids if self.target_ids is None else self.target_ids(draft_ids)

    def over_target_vocab(self, laws: jax.Array) -> jax.Array:
        """Laws over the draft ids as laws over the target's: 0 for all others."""
        return laws if self.target_ids is None else self.target_ids.spread(laws, self.config.vocab_size, 0)
