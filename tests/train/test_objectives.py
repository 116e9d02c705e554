"""What each kind of training computes: serving's own passes, a loss that falls, and the same step however it is cut."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.heads.config import EagleConfig, MedusaConfig
from jaxspec.model.heads.definition import define_heads
from jaxspec.model.heads.parts import TargetTables
from jaxspec.model.llama import define
from jaxspec.model.rope import inverse_frequencies, rotation
from train_heads.config import OptimConfig
from train_heads.draft import DraftObjective
from train_heads.eagle import Eagle3Objective, EagleObjective, _unroll
from train_heads.medusa import MedusaObjective
from train_heads.objective import look
from train_heads.packing import Rows
from train_heads.step import make_look, make_measure, make_step, optimizer, start
from train_heads.words import Words

STEPS = 3


def objective(kind, model):
    config, sharding, dtype = model.config, model.sharding, model.dtype
    if kind == "medusa":
        heads = MedusaConfig(config.hidden_size, config.vocab_size, 3, 1, own_lm_head=False)
        return MedusaObjective(model, define_heads(heads, sharding, dtype), Words(config.vocab_size), 0.8)
    if kind == "draft":
        small = define(dataclasses.replace(config, num_layers=2), sharding, dtype)
        return DraftObjective(model, small, Words(config.vocab_size))
    taken = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope_theta", "vocab_size")
    heads = EagleConfig(
        method=kind,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        max_position_embeddings=config.max_position_embeddings,
        draft_vocab_size=config.vocab_size if kind == "eagle" else 128,
        fc_bias=kind == "eagle",
        own_embed=False,
        **{name: getattr(config, name) for name in taken},
    )
    definition = define_heads(heads, sharding, dtype)
    if kind == "eagle":
        return EagleObjective(model, definition, Words(config.vocab_size), 0.1, 0.1)
    return Eagle3Objective(model, definition, Words(config.vocab_size, tuple(range(0, 512, 4))), STEPS, 0.8)


def begun(kind, target, **optim):
    """An objective, its first (trained, fixed), its first state and its compiled step."""
    model, params = target
    made, config = objective(kind, model), OptimConfig(**optim)
    first = made.init(params, 0)
    state = start(optimizer(config), first[0], model.sharding)
    return made, first, state, make_step(made, config, model.sharding, 0, state)


def tables_of(model):
    return TargetTables(model.embed, model.logits)


def cut(rows, parts):
    return Rows(*(jnp.asarray(x).reshape(parts, -1, x.shape[1]) for x in rows))


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "draft"])
def test_the_loss_falls_and_every_parameter_moves(target, rows, kind):
    _, params = target
    _, (trained, fixed), state, step = begun(kind, target, learning_rate=1e-2, steps=12, warmup=2)
    losses = []
    for _ in range(12):
        state, taken = step(state, fixed, params, cut(rows, 1))
        losses.append(float(taken.loss))
        assert bool(taken.finite)
    assert losses[-1] < 0.9 * losses[0]
    still = [name for name in trained if np.array_equal(state.trained[name], trained[name])]
    assert not still
    assert int(state.step) == 12
    assert step._cache_size() == 1, "the second step is another program"


def test_an_eagle3_head_begins_with_the_targets_last_layer(target, rows):
    """A first token, before one that embeds as nothing: what the last layer makes of the highest level."""
    model, params = target
    made = objective("eagle3", model)
    trained, _ = made.init(params, 0)
    head = made.heads.merge({**trained, "target_ids": jnp.asarray(made.words.ids)})
    found = make_look(made)(params, rows)
    high_BTD = found.taps_BTX[..., -model.config.hidden_size :]
    llama = model.merge({**params, "embed": jnp.zeros_like(params["embed"])})
    positions_BT = jnp.zeros((len(high_BTD), 1), jnp.int32)
    cache = made.heads.empty_cache(len(high_BTD), 1).layers[0]
    tables = tables_of(llama)
    hidden_B1D, _ = head(positions_BT, found.taps_BTX[:, :1], positions_BT, cache, tables)
    cos, sin = rotation(inverse_frequencies(model.config), positions_BT)
    expected, _ = llama.layers[-1](high_BTD[:, :1], cache, positions_BT, None, cos, sin)
    np.testing.assert_allclose(hidden_B1D, expected, atol=1e-4)


def test_parts_and_a_step_without_numbers(target, rows):
    """I11, I16: four parts give the step of one, to rounding; a step that gives no number leaves the state alone."""
    _, params = target
    ends = []
    for parts in (1, 4):
        _, (_, fixed), state, step = begun("medusa", target, learning_rate=1e-2, steps=12, warmup=2)
        for _ in range(2):
            state, taken = step(state, fixed, params, cut(rows, parts))
        ends.append((jax.device_get(state.trained), float(taken.loss)))
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-5)
    for name, value in ends[0][0].items():
        np.testing.assert_allclose(value, ends[1][0][name], atol=1e-4)
    broken = {**params, "final_norm": params["final_norm"] * np.nan}
    before = jax.device_get(state)
    state, taken = step(state, fixed, broken, cut(rows, 4))
    assert not bool(taken.finite)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


def test_noise_is_drawn_anew_in_every_step(target, rows):
    """EAGLE-1's features are moved in training alone: parameters that stay give another loss each time."""
    _, params = target
    made, (trained, fixed), state, step = begun("eagle", target, learning_rate=0.0, steps=3, warmup=0)
    losses = []
    for _ in range(3):
        state, taken = step(state, fixed, params, cut(rows, 1))
        losses.append(float(taken.loss))
    assert len(set(losses)) == 3
    measure, features = make_measure(made), make_look(made)(params, rows)
    quiet = [float(measure(trained, fixed, params, rows, features).loss.mean()) for _ in range(2)]
    assert quiet[0] == quiet[1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_heads_steps_are_those_of_serving(target, rows, kind):
    """I09: positions and visible rows of every step, against the head run as the drafter runs it, step by step."""
    model, params = target
    made = objective(kind, model)
    trained, fixed = made.init(params, 0)
    taps = (2, 4, 5) if kind == "eagle3" else ()
    where = [(0, 0), (0, 23), (1, 5)]

    @jax.jit
    def both(trained, rows):
        found = look(model, params, rows, taps)
        head, tables = made.heads.merge({**trained, **fixed}), tables_of(model.merge(params))
        features = found.taps_BTX if taps else found.hidden_BTD
        return features, jnp.stack(_unroll(made.heads, head, tables, rows, features, STEPS))

    features, unrolled = both(trained, rows)

    @jax.jit
    def serve(trained, tokens, features, positions, next_tokens):
        llama = model.merge(params)
        head, tables = made.heads.merge({**trained, **fixed}), tables_of(llama)
        cache = made.heads.empty_cache(1, 64).layers[0]
        hidden, cache = head(tokens, features, positions, cache, tables)
        last = jnp.max(jnp.where(positions < 64, positions, 0))
        hidden = hidden[:, last][:, None]
        found = [hidden]
        for k in range(1, STEPS):
            at = (last + k)[None, None]
            hidden, cache = head(next_tokens[:, k - 1][:, None], hidden, at, cache, tables)
            found.append(hidden)
        return jnp.concatenate(found, axis=1)[0]

    tokens_BT, positions_BT, segments_BT = (np.asarray(array) for array in rows[:3])
    for row, place in where:
        own = np.flatnonzero(segments_BT[row] == segments_BT[row, place])
        upto = own[own <= place]
        if place + STEPS + 1 > own[-1]:
            raise AssertionError("the case needs a document that goes on")
        count = len(upto)
        padded = np.full((1, 64), 64, np.int32)
        padded[0, :count] = positions_BT[row, upto]
        successors = np.zeros((1, 64), np.int32)
        successors[0, :count] = tokens_BT[row, upto + 1]
        seen = np.zeros((1, 64, features.shape[-1]), np.float32)
        seen[0, :count] = np.asarray(features)[row, upto]
        after = tokens_BT[row, place + 2 : place + 1 + STEPS][None]
        expected = serve(trained, successors, seen, padded, after)
        np.testing.assert_allclose(np.asarray(unrolled)[:, row, place], expected, atol=1e-4)
