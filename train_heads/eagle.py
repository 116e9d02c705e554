"""EAGLE-1 and EAGLE-3: one decoder layer learns to go on from the target's features, and from its own.

Row t of the head joins the feature of token t with token t + 1 and guesses token t + 2: nothing is shifted but by
reading ahead in the row, and positions and visible rows are those of serving (``jaxspec/speculate/drafters/eagle.py``).
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxspec.model.heads.config import EagleConfig, resolved_aux_layers
from jaxspec.model.heads.definition import HeadsDef, random_heads
from jaxspec.model.heads.params import INDEX_LEAVES
from jaxspec.model.heads.parts import TargetTables
from jaxspec.model.llama import ModelDef
from train_heads.losses import Summed, smooth_l1, summed
from train_heads.objective import Features, Level, Measured, Params, cast, measured_levels, rows_ahead
from train_heads.packing import Rows, ahead, columns, served
from train_heads.words import WordLogits, Words


@dataclasses.dataclass(frozen=True)
class EagleObjective:
    """EAGLE-1 (Li et al. 2024): the target's next feature by smooth L1, and what the target would say of it.

    ``token_weight``: of the cross-entropy beside the regression, 0.1 in the paper. ``noise``: features are moved by
    uniform noise of this width on either side, 0.1 in the paper, so that the head bears its own errors later.
    """

    target: ModelDef
    heads: HeadsDef
    words: Words
    token_weight: float
    noise: float
    taps: tuple[int, ...] = ()

    def init(self, target: Mapping[str, jax.Array], seed: int) -> tuple[Params, Params]:
        return _masters(random_heads(self.heads, seed)), {}

    def levels(
        self, trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array | None
    ) -> list[Level]:
        """One: the paper trains a single step, on the target's features."""
        teacher = WordLogits.of(self.target, target, self.words)
        tables = TargetTables(self.target.merge(target).embed, teacher)
        head = self.heads.merge(cast(trained, self.heads.dtype))
        features_BTD = features.hidden_BTD
        if self.noise and key is not None:
            features_BTD += jax.random.uniform(key, features_BTD.shape, minval=-self.noise, maxval=self.noise)
        (hidden_BTD,) = _unroll(self.heads, head, tables, rows, features_BTD, 1)
        return [Level("step0", 2, hidden_BTD, teacher)]

    def __call__(
        self, trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array | None
    ) -> Measured:
        levels = self.levels(trained, fixed, target, rows, features, key)
        teacher = WordLogits.of(self.target, target, self.words)
        measured = measured_levels(levels, [self.token_weight], "law", teacher, self.words, rows, features)
        next_BTD = rows_ahead(features.hidden_BTD, 1)
        feature = summed(smooth_l1(levels[0].hidden_BTD, next_BTD), served(rows, 2))
        # A mean over its own tokens, as the other one is: the two weigh the same whatever the words leave out.
        share = measured.loss.weight / jnp.maximum(feature.weight, 1)
        loss = Summed(measured.loss.total + share * feature.total, measured.loss.weight)
        return Measured(loss, {**measured.shown, "step0/feature": feature})


@dataclasses.dataclass(frozen=True)
class Eagle3Objective:
    """EAGLE-3 (Li et al. 2025): no regression; the head is fed its own outputs for several steps (training-time test).

    Step k drafts token t + 2 + k. What it learns is the target's law there, over the draft's vocabulary. ``decay``:
    step k counts decay ** k (0.8 in the authors' code).
    """

    target: ModelDef
    heads: HeadsDef
    words: Words
    steps: int
    decay: float

    @property
    def config(self) -> EagleConfig:
        assert isinstance(self.heads.config, EagleConfig)
        return self.heads.config

    @property
    def taps(self) -> tuple[int, ...]:
        return resolved_aux_layers(self.config, self.target.config.num_layers)

    def init(self, target: Mapping[str, jax.Array], seed: int) -> tuple[Params, Params]:
        """All of it lent by the target: its last layer over the highest level, and the rows of its LM head."""
        params = _lent(target, self.target, self.config)
        shardings = self.heads.shardings()
        if not self.words.whole:
            params["target_ids"] = jnp.asarray(self.words.ids, jnp.int32)
        params["lm_head"] = self.words.rows(target["embed" if self.target.config.tie_word_embeddings else "lm_head"])
        params = {name: jax.device_put(value, shardings[name]) for name, value in params.items()}
        return _masters(params), {name: value for name, value in params.items() if name in INDEX_LEAVES}

    def levels(
        self, trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array | None
    ) -> list[Level]:
        """One per step."""
        model = self.target.merge(target)
        tables = TargetTables(model.embed, model.logits)
        head = self.heads.merge({**cast(trained, self.heads.dtype), **fixed})
        assert features.taps_BTX is not None
        hidden = _unroll(self.heads, head, tables, rows, features.taps_BTX, self.steps)
        return [
            Level(f"step{step}", 2 + step, hidden_BTD, lambda hidden_BCD: head.logits(hidden_BCD, tables))
            for step, hidden_BTD in enumerate(hidden)
        ]

    def __call__(
        self, trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array | None
    ) -> Measured:
        levels = self.levels(trained, fixed, target, rows, features, key)
        teacher = WordLogits.of(self.target, target, self.words)
        shares = [self.decay**step for step in range(self.steps)]
        return measured_levels(levels, shares, "law", teacher, self.words, rows, features)


def _lent(target: Mapping[str, jax.Array], model: ModelDef, config: EagleConfig) -> Params:
    """Where an EAGLE-3 head begins: ``fc`` passes on the highest level alone. The target's last layer reads it, beside
    the next token as the first layer reads that.

    The head says at once what the target says, a token late, and learns from there (docs/decisions/head-training.md).
    """
    first, last = "layers.0.", f"layers.{model.config.num_layers - 1}."
    D = config.hidden_size
    fc = jnp.zeros((D, config.features_size), jnp.float32).at[:, -D:].set(jnp.eye(D))
    qkv = jnp.concatenate([target[first + "qkv"], target[last + "qkv"]], axis=-1)
    lent = {leaf: target[last + leaf] for leaf in ("o", "mlp_norm", "gate_up", "down")}
    lent |= {"qkv": qkv, "embed_norm": target[first + "attn_norm"], "hidden_norm": target[last + "attn_norm"]}
    return {"fc": fc, "norm": target["final_norm"], **{f"layers.0.{leaf}": value for leaf, value in lent.items()}}


def _masters(params: Mapping[str, jax.Array]) -> Params:
    return {name: value.astype(jnp.float32) for name, value in params.items() if name not in INDEX_LEAVES}


def _unroll(
    heads: HeadsDef, head: object, tables: object, rows: Rows, features_BTX: jax.Array, steps: int
) -> list[jax.Array]:
    """The head's outputs [B, T, D] of ``steps`` passes: the first on the target's features, each other on its own.

    Pass k stands for drafting token t + 2 + k after serving took in the rows up to t: its row t has position t + k,
    joins the output of pass k - 1 with token t + 1 + k, and sees the target's rows up to t and the drafted ones of its
    own t.
    """
    tokens_BT, positions_BT, segments_BT = (jnp.asarray(array) for array in rows[:3])
    cache = heads.empty_cache(tokens_BT.shape[0], 0).layers[0]
    visible = columns(segments_BT)
    outputs = []
    for step in range(steps):
        next_BT = ahead(tokens_BT, 1 + step)
        features_BTX, cache = head(next_BT, features_BTX, positions_BT + step, cache, tables, visible)  # pyright: ignore[reportCallIssue]
        outputs.append(features_BTX)
    return outputs
