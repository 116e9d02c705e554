"""Medusa-1 (Cai et al. 2024): the target is frozen, head i at token t learns token t + 2 + i from its hidden state."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxspec.model.heads.config import MedusaConfig
from jaxspec.model.heads.definition import HeadsDef, random_heads
from jaxspec.model.llama import ModelDef
from train_heads.losses import Summed, cross_entropy, hits, summed
from train_heads.objective import RANKS, Measured, Params, cast, look, over_chunks, tables_of
from train_heads.packing import Rows, ahead, served


@dataclasses.dataclass(frozen=True)
class MedusaObjective:
    """``decay``: head i counts decay ** i, for a deep guess is rarely asked for (0.8 in the authors' code)."""

    target: ModelDef
    heads: HeadsDef
    decay: float

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

    def __call__(self, trained: Params, fixed: Params, target: Params, rows: Rows, key: jax.Array) -> Measured:
        model, output = look(self.target, target, rows)
        heads = self.heads.merge(cast(trained, self.heads.dtype)).heads
        tables = tables_of(model)
        tokens_BT = jnp.asarray(rows.tokens_BT)
        found: dict[str, Summed] = {}
        loss = Summed(jnp.float32(0), jnp.float32(0))
        for index, head in enumerate(heads):
            weights_BT = served(rows, 2 + index)

            def judge(
                hidden_BCD: jax.Array, ids_BC: jax.Array, weights_BC: jax.Array, head: object = head
            ) -> dict[str, Summed]:
                logits_BCV = head(hidden_BCD, tables)  # pyright: ignore[reportCallIssue]
                tops = {f"top{rank}": summed(hits(logits_BCV, ids_BC, rank), weights_BC) for rank in RANKS}
                return {"loss": summed(cross_entropy(logits_BCV, ids_BC), weights_BC), **tops}

            sums = over_chunks(judge, output.hidden_BTD, ahead(tokens_BT, 2 + index), weights_BT)
            found |= {f"head{index}/{name}": value for name, value in sums.items()}
            # Every head's mean over its own tokens, weighed.
            share = self.decay**index
            loss = Summed(
                loss.total + share * sums["loss"].total, loss.weight + (sums["loss"].weight if not index else 0)
            )
        return Measured(loss, found)
