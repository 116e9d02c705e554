"""Common to all kinds of training: what the frozen target sees, what is drafted from it, and what is learnt of that."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxspec.model.cache import empty_cache
from jaxspec.model.llama import ModelDef, Output
from train_heads.losses import Summed, cross_entropy, divergence, hits, soft_cross_entropy, summed
from train_heads.packing import Rows, ahead, packed_tree, served
from train_heads.words import WordLogits, Words

Params = dict[str, jax.Array]
# What a level learns: the token that was said, the target's law where it was said, or the same counted from its
# least possible value.
Learns = Literal["token", "law", "divergence"]

# Tokens of a row whose logits over the vocabulary exist at once.
CHUNK: Final = 128
# Ranks at which a guess counts as a hit, for trees with so many children.
RANKS: Final = (1, 4)


class Features(NamedTuple):
    """What heads are given of the target for each token of packed rows: all of it that training needs."""

    hidden_BTD: jax.Array  # after the final norm, float32
    taps_BTX: jax.Array | None = None  # the residual stream entering the tapped layers, side by side


class Level(NamedTuple):
    """One drafted place: row t's hidden state guesses the token ``place`` after token t."""

    name: str
    place: int
    hidden_BTD: jax.Array
    logits: Callable[[jax.Array], jax.Array]  # hidden_BCD -> float32 [B, C, N] over the words


class Measured(NamedTuple):
    """What a batch gave: the sum that is minimised, and sums that are only shown, by name."""

    loss: Summed
    shown: dict[str, Summed]


class Objective(Protocol):
    """One kind of training. Parameters are float32 masters by name; what is not trained is ``fixed``."""

    @property
    def target(self) -> ModelDef: ...

    @property
    def words(self) -> Words: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose input the heads are given."""
        ...

    def init(self, target: Mapping[str, jax.Array], seed: int) -> tuple[Params, Params]:
        """(trained, fixed) parameters at the start, in their shardings."""
        ...

    def levels(
        self, trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array | None
    ) -> list[Level]:
        """What is drafted, level by level. ``key``: of noise that only training has; None: without."""
        ...

    def __call__(
        self, trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array | None
    ) -> Measured:
        """The sums over ``rows``; differentiable in ``trained``."""
        ...


def look(target: ModelDef, params: Mapping[str, jax.Array], rows: Rows, taps: tuple[int, ...] = ()) -> Features:
    """The target's pass over packed rows: serving's own, on a cache of the rows' length. No gradient enters."""
    output = jax.lax.stop_gradient(run(target, jax.lax.stop_gradient(dict(params)), rows, taps))
    return Features(output.hidden_BTD, output.taps_BTX)


def run(definition: ModelDef, params: Mapping[str, jax.Array], rows: Rows, taps: tuple[int, ...] = ()) -> Output:
    """A model's pass over packed rows."""
    count, T = rows.tokens_BT.shape
    cache = empty_cache(definition.config, definition.sharding, count, T, definition.cache_dtype)
    tokens_BT, positions_BT, segments_BT = (jnp.asarray(array) for array in rows[:3])
    return definition.merge(params)(tokens_BT, positions_BT, cache, packed_tree(segments_BT), taps)


def measured_levels(
    levels: Sequence[Level],
    shares: Sequence[float],
    learns: Learns,
    teacher: WordLogits,
    words: Words,
    rows: Rows,
    features: Features,
) -> Measured:
    """The sum of all levels' losses, each counting its share; hits among the likeliest are shown.

    A place is learnt where serving would draft it, if the token said there is a word; if not, it counts as a miss.
    """
    tokens_BT = jnp.asarray(rows.tokens_BT)
    total, weight = jnp.float32(0), jnp.float32(0)
    shown: dict[str, Summed] = {}
    for level, share in zip(levels, shares, strict=True):

        def judge(
            hidden_BCD: jax.Array,
            next_BCD: jax.Array,
            words_BC: jax.Array,
            served_BC: jax.Array,
            level: Level = level,
        ) -> dict[str, Summed]:
            logits_BCN, teacher_BCN = level.logits(hidden_BCD), teacher(next_BCD)
            known_BC = words_BC < words.size
            said_BC = jnp.where(known_BC, words_BC, 0)
            match learns:
                case "token":
                    loss_BC = cross_entropy(logits_BCN, said_BC)
                case "law":
                    loss_BC = soft_cross_entropy(logits_BCN, teacher_BCN)
                case "divergence":
                    loss_BC = divergence(logits_BCN, teacher_BCN)
            best_BC = jnp.argmax(teacher_BCN, axis=-1)
            tops = {f"top{k}": summed(hits(logits_BCN, best_BC, k) & known_BC, served_BC) for k in RANKS}
            return {"loss": summed(loss_BC, served_BC & known_BC), **tops}

        said_BT = words.place(ahead(tokens_BT, level.place))
        next_BTD = rows_ahead(features.hidden_BTD, level.place - 1)
        sums = over_chunks(judge, level.hidden_BTD, next_BTD, said_BT, served(rows, level.place))
        shown |= {f"{level.name}/{name}": value for name, value in sums.items()}
        total += share * sums["loss"].total
        # The first level's tokens weigh a batch: a share then means the same whatever the number of levels.
        weight = sums["loss"].weight if level is levels[0] else weight
    return Measured(Summed(total, weight), shown)


def guesses(levels: Sequence[Level], words: Words) -> jax.Array:
    """[K, B, T]: the target id that each level thinks likeliest."""

    def best(level: Level) -> jax.Array:
        chunks = [
            jnp.argmax(level.logits(level.hidden_BTD[:, start : start + CHUNK]), axis=-1)
            for start in range(0, level.hidden_BTD.shape[1], CHUNK)
        ]
        return words.target_ids(jnp.concatenate(chunks, axis=1))

    return jnp.stack([best(level) for level in levels])


def cast(params: Mapping[str, jax.Array], dtype: jnp.dtype) -> Params:
    """What the computation sees of float32 masters; ids stay ids."""
    return {
        name: value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value
        for name, value in params.items()
    }


def rows_ahead(values_BTD: jax.Array, places: int) -> jax.Array:
    """The rows ``places`` tokens further on; zeros past the end."""
    return jnp.pad(values_BTD, ((0, 0), (0, places), (0, 0)))[:, places:]


def over_chunks(function: Callable[..., Any], *arrays_BT: jax.Array) -> Any:
    """The sum of ``function`` over chunks of tokens of arrays [B, T, ..]; it returns a tree of sums.

    Logits over the vocabulary exist for one chunk at a time, in the backward pass, too.
    """
    T = arrays_BT[0].shape[1]
    size = min(CHUNK, T)
    if T % size:
        raise ValueError(f"expected rows of a multiple of {size} tokens, got {T}")

    def split(array: jax.Array) -> jax.Array:
        parts = array.reshape(array.shape[0], T // size, size, *array.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    parts = tuple(split(array) for array in arrays_BT)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: function(*(part[0] for part in parts)))
    )

    def add(total: Any, chunk: tuple[jax.Array, ...]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(*chunk)), None

    return jax.lax.scan(jax.checkpoint(add), zeros, parts)[0]
