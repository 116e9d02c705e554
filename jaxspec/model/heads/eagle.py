"""EAGLE heads: one decoder layer over the target's features (Li et al. 2024, EAGLE; 2025, EAGLE-3).

Row t of a pass joins the feature of token t with the embedding of token t + 1 and stands for the guess of token t + 2;
its rotary position and its slot in the head's own cache are t.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.cache import LayerCache, Tree
from jaxspec.model.columns import Columns
from jaxspec.model.heads.config import EagleConfig
from jaxspec.model.heads.params import heads_param_specs
from jaxspec.model.heads.parts import TargetIds, TargetTables, Vector
from jaxspec.model.layers import Linear, RMSNorm, attention, initial_weight, look_up, swiglu
from jaxspec.model.rope import inverse_frequencies, rotation
from jaxspec.sharding import Sharding


class EagleOutput(NamedTuple):
    """What a pass returns: hidden_BTD before any norm (the features of a next step), and the head's cache."""

    hidden_BTD: jax.Array
    cache: LayerCache


class EagleLayer(nnx.Module):
    """The head's decoder layer: attention reads one tensor, the residual starts from another."""

    def __init__(self, config: EagleConfig, sharding: Sharding, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        specs = heads_param_specs(config)
        D, eps = config.hidden_size, config.rms_norm_eps
        self.sharding = sharding
        self.norm_before_residual = config.norm_before_residual
        self.embed_norm = RMSNorm(D, eps, dtype) if config.method == "eagle3" else None
        self.hidden_norm = RMSNorm(D, eps, dtype) if config.method == "eagle3" else None
        self.qkv = Linear(specs["layers.0.qkv"], dtype, rngs)
        self.o = Linear(specs["layers.0.o"], dtype, rngs)
        self.mlp_norm = RMSNorm(D, eps, dtype)
        self.gate_up = Linear(specs["layers.0.gate_up"], dtype, rngs)
        self.down = Linear(specs["layers.0.down"], dtype, rngs)

    def inputs(self, embedded_BTD: jax.Array, hidden_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """EAGLE-3: what attention reads, [B, T, 2 D], and where the residual starts, [B, T, D]."""
        assert self.embed_norm is not None
        assert self.hidden_norm is not None
        normed_BTD = self.hidden_norm(hidden_BTD)
        read = jnp.concatenate([self.embed_norm(embedded_BTD), normed_BTD], axis=-1)
        return read, normed_BTD if self.norm_before_residual else hidden_BTD

    def __call__(
        self,
        read: jax.Array,
        residual_BTD: jax.Array,
        cache: LayerCache,
        positions_BT: jax.Array,
        tree: Tree | Columns | None,
        cos: jax.Array,
        sin: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        attended, cache = attention(self.qkv(read), cache, positions_BT, tree, cos, sin)
        x_BTD = residual_BTD + self._whole(self.o(attended))
        return x_BTD + self._whole(self.down(swiglu(self.gate_up(self.mlp_norm(x_BTD))))), cache

    def _whole(self, x_BTD: jax.Array) -> jax.Array:
        return self.sharding.constrain(x_BTD, "batch", "tokens", "embed")


class TokenTable(nnx.Module):
    """The head's own embeddings [V, D]."""

    def __init__(self, config: EagleConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(initial_weight(heads_param_specs(config)["embed"], dtype, rngs))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return look_up(self.weight[...], tokens_BT)


class EagleHead(nnx.Module):
    """An EAGLE-1 or EAGLE-3 head over parameters as declared in ``params.py``."""

    def __init__(self, config: EagleConfig, sharding: Sharding, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        specs = heads_param_specs(config)
        self.config = config
        self.sharding = sharding
        self.embed = TokenTable(config, dtype, rngs) if config.own_embed else None
        self.fc = Linear(specs["fc"], dtype, rngs)
        self.fc_bias = Vector(config.hidden_size, dtype) if config.fc_bias else None
        self.layers = nnx.List([EagleLayer(config, sharding, dtype, rngs)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype) if config.method == "eagle3" else None
        self.lm_head = Linear(specs["lm_head"], dtype, rngs) if "lm_head" in specs else None
        self.target_ids = TargetIds(config.draft_vocab_size) if config.reduced_vocab else None

    def __call__(
        self,
        tokens_BT: jax.Array,
        features: jax.Array,
        positions_BT: jax.Array,
        cache: LayerCache,
        target: TargetTables,
        tree: Tree | Columns | None = None,
    ) -> EagleOutput:
        """One pass: the prefill of a prompt, a catch-up or a single step.

        tokens_BT are target ids, each the successor of the token that its feature belongs to. ``features`` is
        [B, T, features_size] from the target, or [B, T, D], an earlier pass's ``hidden_BTD``. A position outside the
        cache marks padding: nothing is written there and its output means nothing.
        """
        layer = self.layers[0]
        config = self.config
        tokens_BT = jnp.clip(tokens_BT, 0, config.vocab_size - 1)
        embedded_BTD = self.sharding.constrain((self.embed or target.embed)(tokens_BT), "batch", "tokens", "embed")
        features = features.astype(jnp.float32)
        if config.method == "eagle":
            read = residual_BTD = self.fused(jnp.concatenate([embedded_BTD, features], axis=-1))
        else:
            own = features.shape[-1] == config.hidden_size
            read, residual_BTD = layer.inputs(embedded_BTD, features if own else self.fused(features))
        cos, sin = rotation(inverse_frequencies(config.decoder), positions_BT)
        return EagleOutput(*layer(read, residual_BTD, cache, positions_BT, tree, cos, sin))

    def fused(self, features: jax.Array) -> jax.Array:
        """``fc``: float32 [B, T, D]."""
        x_BTD = self.fc(features)
        return x_BTD if self.fc_bias is None else self.fc_bias.add(x_BTD)

    def logits(self, hidden_BTD: jax.Array, target: TargetTables) -> jax.Array:
        """float32 logits over the *draft* vocabulary, whole on every device; the target's without an LM head."""
        if self.norm is not None:
            hidden_BTD = self.norm(hidden_BTD)
        if self.lm_head is None:
            return target.logits(hidden_BTD)
        return self.sharding.constrain(self.lm_head(hidden_BTD), None, None, None)

    def to_target(self, draft_ids: jax.Array) -> jax.Array:
        """Target ids of draft ids, any shape."""
        return draft_ids if self.target_ids is None else self.target_ids(draft_ids)

    def over_target_vocab(self, logits: jax.Array) -> jax.Array:
        """Draft logits [B, T, draft_vocab_size] as [B, T, V], over the target's vocabulary: -inf for all others."""
        if self.target_ids is None:
            return logits
        return self.target_ids.spread(logits, self.config.vocab_size, -jnp.inf)
