"""Common to all kinds of training: what the frozen target sees, what is drafted from it, and what is learnt of that."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxspec.model.cache import empty_cache
from jaxspec.model.llama import ModelDef, Output
from train_heads.losses import Summed, cross_entropy, divergence, likelier, soft_cross_entropy, summed
from train_heads.packing import Rows, ahead, columns, served
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
    """The target's pass over packed rows. No gradient enters."""
    output = jax.lax.stop_gradient(run(target, jax.lax.stop_gradient(dict(params)), rows, taps))
    return Features(output.hidden_BTD, output.taps_BTX)


def run(definition: ModelDef, params: Mapping[str, jax.Array], rows: Rows, taps: tuple[int, ...] = ()) -> Output:
    """A model's pass over packed rows."""
    cache = empty_cache(definition.config, definition.sharding, len(rows.tokens_BT), 0, definition.cache_dtype)
    tokens_BT, positions_BT, segments_BT = (jnp.asarray(array) for array in rows[:3])
    return definition.merge(params)(tokens_BT, positions_BT, cache, columns(segments_BT), taps)


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
    All levels that guess the token after token s are judged together, so that the teacher speaks once for each.
    """
    said_BT = words.place(ahead(jnp.asarray(rows.tokens_BT), 1))
    asked = tuple(behind(served(rows, level.place), level.place - 1) for level in levels)
    hidden = tuple(behind(level.hidden_BTD, level.place - 1) for level in levels)

    def judge(hidden: Sequence[jax.Array], given: Any) -> tuple[jax.Array, Any]:
        next_BCD, said_BC, asked = given
        teacher_BCN = teacher(next_BCD)
        best_BC = jnp.argmax(teacher_BCN, axis=-1)
        known_BC = said_BC < words.size
        total, shown = jnp.float32(0), {}
        for level, share, hidden_BCD, asked_BC in zip(levels, shares, hidden, asked, strict=True):
            logits_BCN = level.logits(hidden_BCD)
            match learns:
                case "token":
                    loss_BC = cross_entropy(logits_BCN, jnp.where(known_BC, said_BC, 0))
                case "law":
                    loss_BC = soft_cross_entropy(logits_BCN, teacher_BCN)
                case "divergence":
                    loss_BC = divergence(logits_BCN, teacher_BCN)
            loss = summed(loss_BC, asked_BC & known_BC)
            rank_BC = likelier(logits_BCN, best_BC)
            tops = {f"{level.name}/top{k}": summed((rank_BC < k) & known_BC, asked_BC) for k in RANKS}
            shown |= {f"{level.name}/loss": loss, **tops}
            total += share * loss.total
        return total, shown

    total, shown = over_chunks(judge, hidden, (features.hidden_BTD, said_BT, asked))
    # The first level's tokens weigh a batch: a share then means the same whatever the number of levels.
    return Measured(Summed(total, shown[f"{levels[0].name}/loss"].weight), shown)


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


def behind(values_BT: jax.Array, places: int) -> jax.Array:
    """Each row's values ``places`` tokens later, [B, T, ..]; zeros at its start."""
    padding = ((0, 0), (places, 0)) + ((0, 0),) * (values_BT.ndim - 2)
    return jnp.pad(values_BT, padding)[:, : values_BT.shape[1]]


def over_chunks(function: Callable[[Any, Any], tuple[jax.Array, Any]], learnt: Any, given: Any) -> tuple[Any, Any]:
    """The sums of ``function`` over chunks of tokens of trees of arrays [B, T, ..]: a scalar, and sums to be shown.

    The scalar alone has gradients: in ``learnt``, and in whatever ``function`` holds on to. They are taken chunk by
    chunk on the way forward, so that logits over the vocabulary exist once, for one chunk.
    """
    T = jax.tree.leaves(learnt)[0].shape[1]
    size = min(CHUNK, T)
    if T % size:
        raise ValueError(f"expected rows of a multiple of {size} tokens, got {T}")

    def split(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array.reshape(array.shape[0], T // size, size, *array.shape[2:]), 1, 0)

    learnt_parts, given_parts = jax.tree.map(split, (learnt, given))
    first = jax.tree.map(lambda parts: parts[0], (learnt_parts, given_parts))
    of_chunk, held = jax.closure_convert(function, *first)

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    sums = jax.eval_shape(of_chunk, *first, *held)

    @jax.custom_vjp
    def total(held: Any, learnt: Any, given: Any) -> tuple[jax.Array, Any]:
        def add(total: Any, chunk: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_chunk(*chunk, *held)), None

        return jax.lax.scan(add, zeros(sums), (learnt, given))[0]

    def forward(held: Any, learnt: Any, given: Any) -> tuple[Any, Any]:
        def add(total: Any, chunk: Any) -> tuple[Any, Any]:
            def value(held: Any, learnt: Any) -> tuple[jax.Array, Any]:
                return of_chunk(learnt, chunk[1], *held)

            found, (to_held, to_learnt) = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(held, chunk[0])
            return jax.tree.map(jnp.add, total, (found, to_held)), to_learnt

        # Added up in float32, whatever the computation's dtype.
        to_held = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), held)
        (found, to_held), to_learnt = jax.lax.scan(add, (zeros(sums), to_held), (learnt, given))
        return found, (jax.tree.map(lambda x, like: x.astype(like.dtype), to_held, held), to_learnt)

    def backward(saved: Any, weight: Any) -> tuple[Any, Any, None]:
        to_held, to_learnt = jax.tree.map(lambda x: x * weight[0].astype(x.dtype), saved)
        return to_held, to_learnt, None

    total.defvjp(forward, backward)
    return total(held, learnt_parts, given_parts)
