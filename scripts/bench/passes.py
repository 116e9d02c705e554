"""One step against the bare passes of the models in it: what the machinery around them costs."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.cache import empty_cache
from jaxspec.model.llama import ModelDef, define, random_params
from jaxspec.speculate.drafters.linear import LinearDrafter
from jaxspec.speculate.programs import Programs
from jaxspec.speculate.sampling import first_argmax
from jaxspec.speculate.state import DecodeState
from jaxspec.speculate.step import Decoder, Params
from scripts.bench.timing import interleaved, ratio, seconds


class Bare:
    """The jitted forward alone: ids in, greedy ids of the last ``judged`` positions out."""

    def __init__(self, model: ModelDef, params: dict[str, jax.Array], rows: int, slots: int, width: int) -> None:
        def forward(params: Any, tokens: jax.Array, positions: jax.Array, cache: Any) -> Any:
            merged = model.merge(params)
            output = merged(tokens, positions, cache)
            judged = output.hidden_BTD[:, -1:] if width > 16 else output.hidden_BTD
            return first_argmax(merged.logits(judged)), output.cache

        self._forward = jax.jit(forward, donate_argnums=3)
        self._params = params
        self._cache = jax.jit(lambda: empty_cache(model.config, model.sharding, rows, slots, model.cache_dtype))()
        self._tokens = jnp.ones((rows, width), jnp.int32)
        start = 100 if width <= 16 else 0
        self._positions = jnp.broadcast_to(start + jnp.arange(width, dtype=jnp.int32)[None], (rows, width))
        self()

    def __call__(self) -> None:
        ids, self._cache = self._forward(self._params, self._tokens, self._positions, self._cache)
        np.asarray(ids)


class Step:
    """The compiled step on rows that never end, reading its report as the engine does."""

    def __init__(self, programs: Programs, rows: int, window: int, gamma: int) -> None:
        self._programs, self._gamma = programs, gamma
        self._gamma_B = np.full((rows,), gamma, np.int32)
        decoder = programs.decoder
        layout = jax.tree.map(lambda x: x.sharding, programs.abstract_state(rows, window))
        self._fresh: Callable[[], DecodeState] = jax.jit(
            lambda: _running(decoder.empty(rows, window), 100), out_shardings=layout
        )
        self._state = self._fresh()
        self()

    def __call__(self) -> None:
        self._state, report = self._programs.step(self._state, self._gamma_B, self._gamma)
        np.asarray(report.packed)

    def rewind(self) -> None:
        """Back to the start, outside the timing."""
        self._state = jax.block_until_ready(self._fresh())


def _running(state: DecodeState, length: int) -> DecodeState:
    """Rows in the middle of a text that repeats with period 16, so that a lookup always finds something."""
    rows, slots = state.shape
    lengths = jnp.full((rows,), length, jnp.int32)
    tokens = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None] % 16, (rows, slots))
    drafter = state.drafter
    if hasattr(drafter, "found_B"):
        drafter = drafter._replace(found_B=jnp.full_like(drafter.found_B, 8))
    if hasattr(drafter, "length_B"):
        drafter = drafter._replace(length_B=lengths - 1)
    sampling = state.rows.sampling._replace(temperature_B=jnp.zeros((rows,), jnp.float32))
    return state._replace(
        tokens_BS=tokens,
        length_B=lengths,
        finished_B=jnp.zeros((rows,), bool),
        rows=state.rows._replace(sampling=sampling, max_length_B=jnp.full((rows,), slots - 1, jnp.int32)),
        target=state.target._replace(length_B=lengths - 1),
        drafter=drafter,
    )


def step_overhead(programs: Programs, repeats: int) -> dict[str, Any]:
    """One step over the bare target forward of the same width, by gamma bucket, one row."""
    found = {}
    window = programs.shapes.windows[0]
    for gamma in programs.shapes.gammas:
        step = Step(programs, 1, window, gamma)
        bare = Bare(programs.decoder.target, programs.params.target, 1, window, gamma + 1)

        def timed_step(step: Step = step) -> float:
            step.rewind()
            return statistics.median(seconds(step) for _ in range(5))

        def timed_bare(bare: Bare = bare) -> float:
            return statistics.median(seconds(bare) for _ in range(5))

        steps, bares = interleaved(repeats, timed_step, timed_bare)
        found[f"gamma_{gamma}"] = {
            "ratio": ratio(steps, bares),
            "step_ms": round(1e3 * statistics.median(steps), 2),
            "bare_ms": round(1e3 * statistics.median(bares), 2),
        }
    return found


def draft_step_overhead(programs: Programs, repeats: int) -> dict[str, Any]:
    """The same with a draft model in the step: over the target forward plus gamma draft passes (random weights)."""
    target = programs.decoder.target
    config = target.config
    small = define(dataclasses.replace(config, num_layers=4), target.sharding, target.dtype, target.cache_dtype)
    draft_params = random_params(small, seed=0)
    drafter = LinearDrafter(small, config.vocab_size, programs.decoder.valid_vocab)
    decoder = Decoder(target, drafter, programs.decoder.valid_vocab, programs.decoder.law)
    drafting = Programs(decoder, Params(programs.params.target, draft_params), programs.shapes)
    window, gamma = programs.shapes.windows[0], 4
    step = Step(drafting, 1, window, gamma)
    bare = Bare(target, programs.params.target, 1, window, gamma + 1)
    first, draft = (Bare(small, draft_params, 1, window, width) for width in (2, 1))

    def timed_step() -> float:
        step.rewind()
        return statistics.median(seconds(step) for _ in range(5))

    def timed_bare() -> float:
        def passes() -> None:
            bare()
            first()
            for _ in range(gamma - 1):
                draft()

        return statistics.median(seconds(passes) for _ in range(5))

    steps, bares = interleaved(repeats, timed_step, timed_bare)
    return {
        f"gamma_{gamma}": {
            "ratio": ratio(steps, bares),
            "step_ms": round(1e3 * statistics.median(steps), 2),
            "bare_ms": round(1e3 * statistics.median(bares), 2),
        }
    }
