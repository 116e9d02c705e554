"""Medusa-1 (Cai et al. 2024): the target is frozen, head i at token t learns token t + 2 + i from its hidden state."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from jaxspec.model.heads.config import MedusaConfig
from jaxspec.model.heads.definition import HeadsDef, random_heads
from jaxspec.model.heads.parts import TargetTables
from jaxspec.model.llama import ModelDef
from train_heads.objective import Features, Learns, Level, Measured, Params, cast, measured_levels
from train_heads.packing import Rows
from train_heads.words import WordLogits, Words


@dataclasses.dataclass(frozen=True)
class MedusaObjective:
    """``decay``: head i counts decay ** i, for a deep guess is rarely asked for (0.8 in the authors' code).

    ``learns``: the token that was said (the paper's Medusa-1), or the target's law there, of which that token is one
    draw: the same optimum with less noise.
    """

    target: ModelDef
    heads: HeadsDef
    words: Words
    decay: float
    learns: Learns = "token"
    taps: tuple[int, ...] = ()

    @property
    def config(self) -> MedusaConfig:
        assert isinstance(self.heads.config, MedusaConfig)
        return self.heads.config

    def init(self, target: Mapping[str, jax.Array], seed: int) -> tuple[Params, Params]:
        """Blocks of zeros, so that a head begins as the target's own next-token head; so does its own LM head."""
        head = target["embed" if self.target.config.tie_word_embeddings else "lm_head"]
        shardings = self.heads.shardings()
        trained = {
            name: head.astype(jnp.float32) if name.endswith(".lm_head") else jnp.zeros_like(value, jnp.float32)
            for name, value in random_heads(self.heads, seed).items()
        }
        return {name: jax.device_put(value, shardings[name]) for name, value in trained.items()}, {}

    def levels(
        self, trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array | None
    ) -> list[Level]:
        """One per head."""
        heads = self.heads.merge(cast(trained, self.heads.dtype)).heads
        tables = TargetTables(lambda tokens_BT: tokens_BT, WordLogits.of(self.target, target, self.words))
        return [
            Level(f"head{index}", 2 + index, features.hidden_BTD, partial(head, target=tables))
            for index, head in enumerate(heads)
        ]

    def __call__(
        self, trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array | None
    ) -> Measured:
        levels = self.levels(trained, fixed, target, rows, features, key)
        teacher = WordLogits.of(self.target, target, self.words)
        shares = [self.decay**index for index in range(len(levels))]
        return measured_levels(levels, shares, self.learns, teacher, self.words, rows, features)
