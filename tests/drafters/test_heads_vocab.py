"""Heads with a draft vocabulary: the listed ids as before, no other id, and the target's text."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Engine, SamplingParams, SpeculationConfig
from jaxspec.engine.draft_vocab import trim_heads
from jaxspec.engine.load import load
from jaxspec.errors import UserError
from jaxspec.model.heads.config import MedusaConfig
from jaxspec.model.heads.definition import define_heads, random_heads
from jaxspec.model.heads.parts import TargetTables
from tests.engine.conftest import Job, Rig, greedy, widest
from tests.engine.laws import Ranks
from tests.engine.watch import Watch

SIZES = {"medusa": 332, "eagle1": 332, "eagle3": 92}  # four devices divide them; eagle3's own vocabulary has 128 ids
METHODS = {"medusa": "medusa", "eagle1": "eagle", "eagle3": "eagle3"}
TARGETS = {"medusa": "tiny-llama3", "eagle1": "tiny-llama3", "eagle3": "tiny-llama3-8l"}
OPTIONS = {"mesh": "1", "dtype": None, "max_slots": 2, "max_len": 61}


def frequent(count: int = 500) -> list[int]:
    return np.random.default_rng(7).permutation(500)[:count].tolist()


@pytest.fixture(scope="module")
def listed(heads_folders, tmp_path_factory) -> Callable[..., Path]:
    """``listed(fixture, ids)``: the heads with this list of their most frequent ids."""

    def make(fixture: str, ids: object) -> Path:
        folder = tmp_path_factory.mktemp("listed") / fixture
        shutil.copytree(heads_folders(fixture), folder)
        (folder / "draft_vocab.json").write_text(json.dumps(ids))
        return folder

    return make


def logits_of(loaded, hidden_BTD):
    """What the heads say over the draft's ids, and over the target's: laws of Medusa are 0 outside, logits -inf."""
    drafter, params = loaded.programs.decoder.drafter, loaded.programs.params

    @jax.jit
    def run(params):
        target = loaded.programs.decoder.target.merge(params.target)
        module, tables = drafter.heads.merge(params.drafter), TargetTables(target.embed, target.logits)
        logits = module(hidden_BTD, tables) if hasattr(module, "heads") else module.logits(hidden_BTD, tables)
        return logits, module.over_target_vocab(logits), module.to_target(jnp.arange(logits.shape[-1]))

    return (np.asarray(x) for x in run(params))


@pytest.mark.parametrize("mesh", ["1", "4"])
@pytest.mark.parametrize("kind", ["first", "listed"])
@pytest.mark.parametrize("fixture", SIZES)
def test_listed_ids_keep_their_logits_and_no_other_is_left(fixture, kind, mesh, checkpoints, heads_folders, listed):
    """And nothing of the size of the whole vocabulary is kept beside the target."""
    size = SIZES[fixture]
    folder = listed(fixture, frequent()) if kind == "listed" else heads_folders(fixture)
    trimmed, whole = (
        load(
            checkpoints(TARGETS[fixture]),
            draft=None,
            heads=folder,
            speculation=SpeculationConfig(method=METHODS[fixture], draft_vocab_size=wanted),
            **{**OPTIONS, "mesh": mesh},
        )
        for wanted in (size, None)
    )
    hidden_BTD = jnp.asarray(np.random.default_rng(3).standard_normal((2, 3, 64)), jnp.float32)
    own, spread, ids_N = logits_of(trimmed, hidden_BTD)
    _, expected, own_ids = logits_of(whole, hidden_BTD)
    known = set(own_ids.tolist())
    ids = [token for token in (frequent() if kind == "listed" else range(512)) if token in known][:size]
    assert sorted(ids_N.tolist()) == sorted(ids)
    assert own.shape[-1] == size
    # Products of other shapes round otherwise: 1e-6 of the largest.
    limit = 1e-6 * np.abs(expected[..., ids]).max()
    np.testing.assert_allclose(spread[..., ids], expected[..., ids], rtol=0, atol=limit)
    outside = np.setdiff1d(np.arange(512), ids)
    assert (spread[..., outside] == (0 if fixture == "medusa" else -np.inf)).all()
    held = trimmed.programs.params.drafter
    assert {x.shape[0] for name, x in held.items() if name.endswith("lm_head")} == {size}
    if mesh == "4":
        heads = [x for name, x in held.items() if name.endswith("lm_head")]
        assert all(x.sharding.shard_shape(x.shape) == (size // 4, 64) for x in heads)


@pytest.mark.parametrize("fixture", ["medusa", "eagle3"])
def test_without_the_option_heads_say_what_is_listed(fixture, checkpoints, heads_folders, listed):
    """But a head with a vocabulary of its own says all of that."""

    def said(folder):
        speculation = SpeculationConfig(method=METHODS[fixture])
        loaded = load(checkpoints(TARGETS[fixture]), draft=None, heads=folder, speculation=speculation, **OPTIONS)
        _, _, ids_N = logits_of(loaded, jnp.zeros((1, 1, 64)))
        return ids_N.tolist()

    expected = sorted(frequent(70)) if fixture == "medusa" else said(heads_folders(fixture))
    assert said(listed(fixture, frequent(70))) == expected


def test_medusa_heads_that_share_the_targets_head_take_its_rows(checkpoints, tmp_path):
    loaded = load(checkpoints("tiny-llama3"), draft=None, speculation=SpeculationConfig(method="none"), **OPTIONS)
    model, params = loaded.programs.decoder.target, loaded.programs.params.target
    config = MedusaConfig(64, 512, 2, 1, own_lm_head=False)
    heads = define_heads(config, model.sharding, model.dtype)
    own = random_heads(heads, 5)
    (tmp_path / "draft_vocab.json").write_text(json.dumps(frequent()))
    found = trim_heads(config, None, tmp_path, 91, 500)
    assert found is not None
    assert trim_heads(config, None, tmp_path / "without", 512, 512) is None  # all there are
    small = define_heads(found.config, model.sharding, model.dtype)
    trimmed = found.params(own, params, model)
    assert {name: x.shape for name, x in trimmed.items()} == {
        name: spec.shape for name, spec in small.abstract_params().items()
    }
    hidden_BTD = jnp.asarray(np.random.default_rng(3).standard_normal((2, 1, 64)), jnp.float32)

    @jax.jit
    def run(own, trimmed, params):
        target = model.merge(params)
        tables = TargetTables(target.embed, target.logits)
        return heads.merge(own)(hidden_BTD, tables), small.merge(trimmed)(hidden_BTD, tables)

    whole, rows = (np.asarray(x) for x in run(own, trimmed, params))
    np.testing.assert_allclose(rows, whole[..., np.sort(frequent()[:91])], rtol=0, atol=1e-6 * np.abs(whole).max())


RIGS = {
    "eagle1-chain": ("eagle1", {}, {"tree_topk": 1, "num_speculative_tokens": 4, "rejection_sample_method": "token"}),
    "medusa": ("medusa", {}, {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}),
    "eagle3-tree": ("eagle3", {"mesh": "4"}, {"tree_topk": 4, "tree_depth": 4, "tree_nodes": 12}),
}


@pytest.fixture(scope="module")
def rigs(references, checkpoints, listed) -> Iterator[Callable[[str], Rig]]:
    made: dict[str, Rig] = {}

    def rig(name: str) -> Rig:
        if name not in made:
            fixture, options, speculation = RIGS[name]
            engine = Engine.load(
                checkpoints(TARGETS[fixture]),
                heads=listed(fixture, frequent()),
                speculation=SpeculationConfig(method=METHODS[fixture], draft_vocab_size=SIZES[fixture], **speculation),
                **{"mesh": "1", "max_slots": 3, "max_len": 240, "max_queue": 4096, **options},
            )
            widest(engine)
            made[name] = Rig(engine, Watch(engine), references[TARGETS[fixture]])
        return made[name]

    yield rig
    for one in made.values():
        one.engine.close()


@pytest.mark.parametrize("name", RIGS)
def test_greedy_text_is_the_reference_text(rigs, shared, name):
    """Chain, drawn static tree, and a dynamic tree on four devices; drafts still stand, the listed ones alone."""
    rig, ids = rigs(name), set(frequent())
    data = np.load(shared / "fixtures" / TARGETS[RIGS[name][0]] / "goldens.npz")
    prompts = ("p7",) * 3 if name == "eagle3-tree" else ("p7", "p33", "p150")  # one chunk: four devices compile slowly
    jobs = [Job(data[f"{prompt}__input_ids"].tolist(), greedy(64)) for prompt in prompts]
    for prompt, chunks in zip(prompts, rig.chunks(jobs), strict=True):
        text = [token for chunk in chunks for token in chunk.token_ids]
        assert text == data[f"{prompt}__greedy_ids"].tolist()
        assert drafts(chunks) <= ids
    assert rig.engine.loads().counters.num_accepted_tokens > 20


def drafts(chunks) -> set[int]:
    return {
        token
        for chunk in chunks
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True)
        if origin == "draft"
    }


@pytest.mark.parametrize("name", ["eagle1-chain", "medusa"])
def test_sampled_text_follows_the_target_and_drafts_lie_inside(rigs, shared, name):
    """q over fewer ids than p. All tokens together, as the block law asks; the false-alarm rate is test_law.py's."""
    rig, ids = rigs(name), set(frequent()[: SIZES[RIGS[name][0]]])
    data = np.load(shared / "fixtures" / "tiny-llama3" / "goldens.npz")
    jobs = []
    for prompt in ("p7", "p33"):
        for n in range(60):
            start = [*data[f"{prompt}__input_ids"].tolist(), *data[f"{prompt}__greedy_ids"].tolist()[:n]]
            sampling = SamplingParams(max_tokens=10, temperature=0.7, top_p=0.9, seed=n, ignore_eos=True)
            jobs.append(Job(start, sampling, 4))
    streams = rig.chunks(jobs)
    found = set().union(*(drafts(chunks) for chunks in streams))
    assert len(found) > 15
    assert found <= ids
    ranks = Ranks(rig, jobs, streams)
    ranks.assert_uniform("all", 1000)
    assert abs(ranks.z) < 5


@pytest.mark.parametrize(
    ("fixture", "ids", "size", "words"),
    [
        ("medusa", None, 513, "draft_vocab_size: expected at most [0-9]+, the ids that heads and target know, got 513"),
        ("eagle3", None, 129, "draft_vocab_size: expected at most 128, the ids that heads and target know, got 129"),
        ("eagle1", [*range(70), 3], 70, "expected each id once, got 1 repetitions"),
        ("eagle3", list(range(500, 400, -1)), 70, "expected at least draft_vocab_size=70 ids"),
    ],
)
def test_a_size_or_a_list_that_does_not_fit_is_refused(fixture, ids, size, words, checkpoints, heads_folders, listed):
    folder = heads_folders(fixture) if ids is None else listed(fixture, ids)
    config = SpeculationConfig(method=METHODS[fixture], draft_vocab_size=size)
    with pytest.raises(UserError, match=words):
        load(checkpoints(TARGETS[fixture]), draft=None, heads=folder, speculation=config, **OPTIONS)


def test_what_cannot_be_drawn_and_what_goes_unused_is_said(checkpoints, heads_folders):
    target = checkpoints("tiny-llama3")
    config = SpeculationConfig(method="eagle", draft_sample_method="probabilistic")
    with pytest.raises(UserError, match="draft_sample_method: expected greedy, because EAGLE's tree"):
        load(target, draft=None, heads=heads_folders("eagle1"), speculation=config, **OPTIONS)
    with pytest.raises(UserError, match="draft_sample_method: expected greedy or probabilistic, got 'gumbel'"):
        SpeculationConfig(draft_sample_method="gumbel")
    config = SpeculationConfig(method="ngram", draft_sample_method="greedy", draft_vocab_size=90)
    notes = load(target, draft=None, speculation=config, **OPTIONS).notes
    for name in ("draft_vocab_size", "draft_sample_method"):
        assert f"{name}: ignored by method ngram" in notes
