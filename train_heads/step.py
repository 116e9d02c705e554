"""One optimiser step: gradients of sums, added up over parts, divided once by the weight of the whole batch.

So neither the number of devices nor that of the parts changes what a token counts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jaxspec.sharding import Sharding
from train_heads.config import OptimConfig
from train_heads.losses import Summed
from train_heads.objective import Features, Measured, Objective, Params, look
from train_heads.packing import Rows


class TrainState(NamedTuple):
    """All that a run carries from step to step; what it resumes from."""

    step: jax.Array  # int32, optimiser steps that were taken
    trained: Params  # float32
    moments: Any  # the optimiser's


class Taken(NamedTuple):
    """What a step tells: f32 scalars. Where ``finite`` is false the state is as it was."""

    loss: jax.Array
    shown: dict[str, jax.Array]
    norm: jax.Array  # of the gradient, before clipping
    rate: jax.Array
    finite: jax.Array  # bool


def schedule(config: OptimConfig) -> optax.Schedule:
    """The learning rate by optimiser step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(config.warmup, 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup,
        decay_steps=max(config.steps, config.warmup + 1),
        end_value=config.learning_rate * config.final,
    )


def optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Clipping, then AdamW; vectors (norms, biases) do not decay."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule(config),
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )


def start(transform: optax.GradientTransformation, trained: Params, sharding: Sharding) -> TrainState:
    """The state before the first step: copies, for a step donates it. The moments lie where their parameters do."""
    trained = {name: jnp.array(value, copy=True, device=value.sharding) for name, value in trained.items()}
    layout = {name: value.sharding for name, value in trained.items()}

    whole = sharding.replicated

    def like(path: Any, x: jax.ShapeDtypeStruct) -> Any:
        name = str(getattr(path[-1], "key", "")) if path else ""
        return layout.get(name, whole) if x.ndim else whole

    abstract = jax.eval_shape(transform.init, trained)
    moments = jax.jit(transform.init, out_shardings=jax.tree_util.tree_map_with_path(like, abstract))(trained)
    return TrainState(jax.device_put(jnp.int32(0), whole), trained, moments)


def make_step(
    objective: Objective, config: OptimConfig, sharding: Sharding, seed: int, like: TrainState
) -> Callable[..., tuple[TrainState, Taken]]:
    """The compiled step: (state, fixed, target, rows [A, B, T], features of them) with A parts.

    It donates the state, which lies as ``like`` does. Without features the target's pass is part of the step.
    """
    transform, rate_of = optimizer(config), schedule(config)

    def loss_of(
        trained: Params, fixed: Params, target: Params, rows: Rows, features: Features, key: jax.Array
    ) -> tuple[jax.Array, Measured]:
        measured = objective(trained, fixed, target, rows, features, key)
        return measured.loss.total, measured

    def step(
        state: TrainState, fixed: Params, target: Params, rows: Rows, features: Features | None = None
    ) -> tuple[TrainState, Taken]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)

        def part(index: jax.Array, rows: Rows, features: Features | None) -> tuple[Params, Measured]:
            rows = Rows(*(sharding.constrain(jnp.asarray(x), "batch", "tokens") for x in rows))
            if features is None:
                features = look(objective.target, target, rows, objective.taps)
            features = jax.tree.map(lambda x: sharding.constrain(x, "batch", "tokens", "embed"), features)
            grads, measured = jax.grad(loss_of, has_aux=True)(
                state.trained, fixed, target, rows, features, jax.random.fold_in(key, index)
            )
            return grads, measured

        def add(total: Any, each: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, part(*each)), None

        parts = (jnp.arange(rows.tokens_BT.shape[0]), rows, features)
        first = jax.eval_shape(lambda: part(*jax.tree.map(lambda x: jnp.asarray(x)[0], parts)))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
        (grads, measured), _ = jax.lax.scan(add, zeros, parts)
        weight = jnp.maximum(measured.loss.weight, 1)
        grads = jax.tree.map(lambda x: x / weight, grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(measured.loss.total)
        updates, moments = transform.update(grads, state.moments, state.trained)
        trained = cast(Params, optax.apply_updates(state.trained, updates))
        after = TrainState(state.step + 1, trained, moments)
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
        shown = {name: value.mean() for name, value in measured.shown.items()}
        return state, Taken(measured.loss.mean(), shown, norm, jnp.asarray(rate_of(after.step - 1)), finite)

    # Laid out as it came, so that the second step is not another program.
    layout = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(step, donate_argnums=0, out_shardings=(layout, sharding.replicated))


def make_measure(objective: Objective) -> Callable[[Params, Params, Params, Rows, Features], Measured]:
    """The compiled sums over rows [B, T], without a step and without noise."""
    return jax.jit(
        lambda trained, fixed, target, rows, features: objective(trained, fixed, target, rows, features, None)
    )


def make_look(objective: Objective) -> Callable[[Params, Rows], Features]:
    """The compiled pass of the target over rows [B, T]."""
    return jax.jit(lambda target, rows: look(objective.target, target, rows, objective.taps))


def mean(measured: list[Measured]) -> dict[str, float]:
    """Means over several batches, each token counted once."""
    total: dict[str, Summed] = {}
    for each in measured:
        for name, value in (("loss", each.loss), *each.shown.items()):
            total[name] = total[name] + value if name in total else value
    return {name: float(value.mean()) for name, value in total.items()}
