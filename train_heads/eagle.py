"""EAGLE-1 and EAGLE-3: one decoder layer learns to go on from the target's features, and from its own.

Row t of the head joins the feature of token t with token t + 1 and guesses token t + 2: nothing is shifted but by
reading ahead in the row, and positions and visible rows are those of serving (``jaxspec/speculate/drafters/eagle.py``).
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxspec.model.cache import Tree
from jaxspec.model.heads.config import EagleConfig, resolved_aux_layers
from jaxspec.model.heads.definition import HeadsDef, random_heads
from jaxspec.model.heads.params import INDEX_LEAVES
from jaxspec.model.llama import ModelDef
from train_heads.losses import Summed, hits, smooth_l1, soft_cross_entropy, summed
from train_heads.objective import RANKS, Measured, Params, cast, look, over_chunks, tables_of
from train_heads.packing import Rows, ahead, packed_tree, served


@dataclasses.dataclass(frozen=True)
class EagleObjective:
    """EAGLE-1 (Li et al. 2024): the target's next feature by smooth L1, and what the target would say of it.

    ``token_weight``: of the cross-entropy beside the regression, 0.1 in the paper. ``noise``: features are moved by
    uniform noise of this width on either side, 0.1 in the paper, so that the head bears its own errors later.
    """

    target: ModelDef
    heads: HeadsDef
    token_weight: float
    noise: float

    def init(self, target: Mapping[str, jax.Array], seed: int) -> tuple[Params, Params]:
        return _masters(random_heads(self.heads, seed)), {}

    def __call__(self, trained: Params, fixed: Params, target: Params, rows: Rows, key: jax.Array) -> Measured:
        model, output = look(self.target, target, rows)
        tables = tables_of(model)
        head = self.heads.merge(cast(trained, self.heads.dtype))
        features_BTD = output.hidden_BTD
        if self.noise:
            features_BTD += jax.random.uniform(key, features_BTD.shape, minval=-self.noise, maxval=self.noise)
        hidden_BTD = _unroll(self.heads, head, tables, rows, features_BTD, 1)[0]

        def judge(hidden_BCD: jax.Array, next_BCD: jax.Array, weights_BC: jax.Array) -> dict[str, Summed]:
            logits_BCV, teacher_BCV = tables.logits(hidden_BCD), tables.logits(next_BCD)
            ids_BC = jnp.argmax(teacher_BCV, axis=-1)
            return {
                "feature": summed(smooth_l1(hidden_BCD, next_BCD), weights_BC),
                "token": summed(soft_cross_entropy(logits_BCV, teacher_BCV), weights_BC),
                **{f"top{rank}": summed(hits(logits_BCV, ids_BC, rank), weights_BC) for rank in RANKS},
            }

        found = over_chunks(judge, hidden_BTD, _ahead(output.hidden_BTD, 1), served(rows, 2))
        loss = found["feature"].total + self.token_weight * found["token"].total
        return Measured(
            Summed(loss, found["feature"].weight), {f"step0/{name}": value for name, value in found.items()}
        )


@dataclasses.dataclass(frozen=True)
class Eagle3Objective:
    """EAGLE-3 (Li et al. 2025): no regression; the head is fed its own outputs for several steps (training-time test).

    Step k drafts token t + 2 + k. What it learns is the target's law there, over the draft's vocabulary. ``decay``:
    step k counts decay ** k (0.8 in the authors' code).
    """

    target: ModelDef
    heads: HeadsDef
    target_ids: tuple[int, ...]  # of the draft's vocabulary, ascending; empty: all
    steps: int
    decay: float

    @property
    def config(self) -> EagleConfig:
        assert isinstance(self.heads.config, EagleConfig)
        return self.heads.config

    def init(self, target: Mapping[str, jax.Array], seed: int) -> tuple[Params, Params]:
        """The LM head begins as the target's rows of its vocabulary, the rest at random."""
        params = random_heads(self.heads, seed)
        shardings = self.heads.shardings()
        table = target["embed" if self.target.config.tie_word_embeddings else "lm_head"]
        if self.target_ids:
            ids = jnp.asarray(self.target_ids, jnp.int32)
            params["target_ids"], table = ids, table[ids]
        params["lm_head"] = table
        params = {name: jax.device_put(value, shardings[name]) for name, value in params.items()}
        return _masters(params), {name: value for name, value in params.items() if name in INDEX_LEAVES}

    def __call__(self, trained: Params, fixed: Params, target: Params, rows: Rows, key: jax.Array) -> Measured:
        taps = resolved_aux_layers(self.config, self.target.config.num_layers)
        model, output = look(self.target, target, rows, taps)
        tables = tables_of(model)
        head = self.heads.merge({**cast(trained, self.heads.dtype), **fixed})
        assert output.taps_BTX is not None
        hidden = _unroll(self.heads, head, tables, rows, output.taps_BTX, self.steps)
        place_V = None
        if self.target_ids:
            outside = jnp.full((self.config.vocab_size,), self.config.draft_vocab_size, jnp.int32)
            place_V = outside.at[fixed["target_ids"]].set(jnp.arange(self.config.draft_vocab_size, dtype=jnp.int32))

        def judge(hidden_BCD: jax.Array, next_BCD: jax.Array, weights_BC: jax.Array) -> dict[str, Summed]:
            logits_BCV = head.logits(hidden_BCD, tables)
            teacher_BCV = tables.logits(next_BCD)
            best_BC = jnp.argmax(teacher_BCV, axis=-1)
            known_BC = jnp.ones(best_BC.shape, bool)
            if place_V is not None:
                teacher_BCV = teacher_BCV[..., fixed["target_ids"]]
                best_BC = place_V[best_BC]
                known_BC = best_BC < self.config.draft_vocab_size
            best_BC = jnp.where(known_BC, best_BC, 0)
            return {
                # A token outside the draft's vocabulary teaches nothing but counts as a miss.
                "loss": summed(soft_cross_entropy(logits_BCV, teacher_BCV), weights_BC & known_BC),
                **{f"top{rank}": summed(hits(logits_BCV, best_BC, rank) & known_BC, weights_BC) for rank in RANKS},
            }

        found: dict[str, Summed] = {}
        total, weight = jnp.float32(0), jnp.float32(0)
        for step, hidden_BTD in enumerate(hidden):
            sums = over_chunks(judge, hidden_BTD, _ahead(output.hidden_BTD, 1 + step), served(rows, 2 + step))
            found |= {f"step{step}/{name}": value for name, value in sums.items()}
            total += self.decay**step * sums["loss"].total
            weight += sums["loss"].weight if step == 0 else 0
        return Measured(Summed(total, weight), found)


def _masters(params: Mapping[str, jax.Array]) -> Params:
    return {name: value.astype(jnp.float32) for name, value in params.items() if name not in INDEX_LEAVES}


def _ahead(values_BTD: jax.Array, places: int) -> jax.Array:
    """The rows ``places`` tokens further on; zeros past the end."""
    return jnp.pad(values_BTD, ((0, 0), (0, places), (0, 0)))[:, places:]


def _unroll(
    heads: HeadsDef, head: object, tables: object, rows: Rows, features_BTX: jax.Array, steps: int
) -> list[jax.Array]:
    """The head's outputs [B, T, D] of ``steps`` passes: the first on the target's features, each other on its own.

    Pass k stands for drafting token t + 2 + k after serving took in the rows up to t: its row t has position t + k,
    joins the output of pass k - 1 with token t + 1 + k, and sees the target's rows up to t and the drafted ones of its
    own t. All passes share one cache, as the levels of a tree do.
    """
    tokens_BT, positions_BT, segments_BT = (jnp.asarray(array) for array in rows[:3])
    count, T = tokens_BT.shape
    cache = heads.empty_cache(count, steps * T).layers[0]
    own_BTT = jnp.broadcast_to(jnp.eye(T, dtype=bool)[None], (count, T, T))
    above_BTU = packed_tree(segments_BT).ancestors_BTU
    padding_BT = positions_BT >= T
    base_B = jnp.zeros((count,), jnp.int32)
    outputs = []
    for step in range(steps):
        if step:
            above_BTU = jnp.concatenate([above_BTU, own_BTT], axis=2)
        at_BT = jnp.where(padding_BT, steps * T, positions_BT + step)
        tree = Tree(base_B, jnp.int32(step * T), above_BTU)
        features_BTX, cache = head(ahead(tokens_BT, 1 + step), features_BTX, at_BT, cache, tables, tree)  # pyright: ignore[reportCallIssue]
        outputs.append(features_BTX)
    return outputs
