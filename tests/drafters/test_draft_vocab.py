"""A draft with a trimmed head: it says the ids that stayed and no other, by the law that it reports."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Engine, SamplingParams, SpeculationConfig
from jaxspec.engine.load import load
from jaxspec.errors import UserError
from jaxspec.speculate.drafters.linear import TRIMMED_HEAD
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.sampling import RowSampling
from jaxspec.speculate.state import Context
from tests.engine.conftest import Job, Rig, greedy, widest
from tests.engine.laws import Ranks
from tests.engine.watch import Watch

SIZE = 331  # no power of two, no divisor of the vocabulary


def config(size: int | None) -> SpeculationConfig:
    return SpeculationConfig(method="draft_model", draft_vocab_size=size, num_speculative_tokens=4)


@pytest.fixture(scope="module")
def listed(checkpoints, tmp_path_factory) -> Callable[[object], Path]:
    """``listed(ids)``: the near draft with this list of its most frequent ids."""

    def make(ids: object) -> Path:
        folder = tmp_path_factory.mktemp("listed") / "near"
        shutil.copytree(checkpoints("near"), folder)
        (folder / "draft_vocab.json").write_text(ids if isinstance(ids, str) else json.dumps(ids))
        return folder

    return make


def frequent(count: int = 400) -> list[int]:
    return np.random.default_rng(7).permutation(500)[:count].tolist()


OPTIONS = {"mesh": "1", "dtype": None, "max_slots": 2, "max_len": 61}


@pytest.mark.parametrize("kind", ["first", "listed", "tied"])
def test_drafts_are_drawn_from_the_law_over_the_ids_that_stayed(kind, checkpoints, listed, tied_draft):
    """q is the whole head's law, filtered and renormalised over those ids; no draft lies outside, nor a greedy one."""
    folder = {"first": checkpoints("near"), "listed": listed(frequent()), "tied": tied_draft}[kind]
    ids = np.array(frequent()[:SIZE]) if kind == "listed" else np.arange(SIZE)
    made = [load(checkpoints("tiny-llama3"), draft=folder, speculation=config(s), **OPTIONS) for s in (SIZE, None)]
    if kind == "listed":  # a folder with a list says what is listed; the whole head is that of a folder without
        said = made[1].programs.params.drafter[TRIMMED_HEAD].shape[0]
        assert said == len(frequent())
        made[1] = load(checkpoints("tiny-llama3"), draft=checkpoints("near"), speculation=config(None), **OPTIONS)
    drawn, rows, gamma = 5, 10, 4
    rng = np.random.default_rng(1)
    tokens_BS = jnp.asarray(rng.integers(0, 490, size=(rows, 61)), jnp.int32)
    length_B = jnp.array([2, 7, 11, 23, 40] * 2, jnp.int32)
    sampling = RowSampling(
        jnp.array([0.8] * drawn + [0.0] * (rows - drawn)),
        jnp.zeros((rows,), jnp.int32),
        jnp.full((rows,), 1.0),
        jnp.zeros((rows,)),
    )
    seed_B2 = jnp.asarray(rng.integers(0, 2**31, size=(rows, 2)), jnp.uint32)
    results = []
    for loaded in made:
        decoder, params = loaded.programs.decoder, loaded.programs.params
        assert (TRIMMED_HEAD in params.drafter) == (loaded is made[0])
        empty = decoder.empty(rows, 61)
        context = Context(tokens_BS, length_B, empty.rows._replace(sampling=sampling, seed_B2=seed_B2))

        def draft(context, params=params, decoder=decoder, empty=empty):
            drafter = decoder.drafter
            state = drafter.prefill(params.drafter, empty.drafter, context, jnp.int32(0), 64)
            draws = Draws(seed_B2, length_B, coupled=False)
            return drafter.propose(params.drafter, decoder.target.merge(params.target), state, context, gamma, draws)[0]

        results.append(jax.jit(draft)(context))
    trimmed, whole = results
    assert np.isin(np.asarray(trimmed.tokens_BJ), ids).all()
    for rows_ in (slice(drawn), slice(drawn, None)):
        assert not np.isin(np.asarray(whole.tokens_BJ)[rows_], ids).all(), "the whole head drafts none of the other ids"
    q_BJV, whole_BJV = (np.asarray(proposal.q_BJV, np.float64)[:drawn] for proposal in results)
    outside = np.setdiff1d(np.arange(q_BJV.shape[2]), ids)
    assert (q_BJV[:, :, outside] == 0).all()
    # At the first place both stand after the same tokens.
    expected_BV = whole_BJV[:, 0].copy()
    expected_BV[:, outside] = 0
    expected_BV /= expected_BV.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(q_BJV[:, 0], expected_BV, atol=1e-5)


def test_a_greedy_chain_is_the_likeliest_one_at_any_temperature(checkpoints):
    """``draft_sample_method``: the tokens of a drawn chain at temperature 0, and no law."""
    rows, gamma = 5, 3
    tokens_BS = jnp.asarray(np.random.default_rng(2).integers(0, 490, size=(rows, 61)), jnp.int32)
    length_B = jnp.array([2, 7, 11, 23, 40], jnp.int32)
    results = {}
    for sample, temperature in (("greedy", 0.9), ("probabilistic", 0.0), ("probabilistic", 0.9)):
        speculation = SpeculationConfig(method="draft_model", draft_sample_method=sample)
        loaded = load(checkpoints("tiny-llama3"), draft=checkpoints("near"), speculation=speculation, **OPTIONS)
        decoder, params = loaded.programs.decoder, loaded.programs.params
        empty = decoder.empty(rows, 61)
        sampling = empty.rows.sampling._replace(temperature_B=jnp.full((rows,), temperature))
        context = Context(tokens_BS, length_B, empty.rows._replace(sampling=sampling))

        def draft(context, params=params, decoder=decoder, empty=empty):
            drafter = decoder.drafter
            state = drafter.prefill(params.drafter, empty.drafter, context, jnp.int32(0), 64)
            draws = Draws(context.rows.seed_B2, length_B, coupled=False)
            target = decoder.target.merge(params.target)
            return drafter.propose(params.drafter, target, state, context, gamma, draws)[0]

        results[sample, temperature] = jax.jit(draft)(context)
    found = {case: np.asarray(proposal.tokens_BJ) for case, proposal in results.items()}
    assert results["greedy", 0.9].q_BJV is None
    np.testing.assert_array_equal(found["greedy", 0.9], found["probabilistic", 0.0])
    assert (found["greedy", 0.9] != found["probabilistic", 0.9]).any()


@pytest.fixture(scope="module")
def tied_draft(checkpoints, variant, references) -> Path:
    """A draft without a head of its own."""
    reference = variant("tied", lambda name, x: x)
    file = reference.folder / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    references["tied"] = reference
    from safetensors.numpy import load_file, save_file

    weights = reference.folder / "hf" / "model.safetensors"
    save_file({name: x for name, x in load_file(weights).items() if name != "lm_head.weight"}, weights)
    return checkpoints("tied")


@pytest.fixture(scope="module")
def trimmed(references, checkpoints, listed) -> Iterator[Rig]:
    options = {"mesh": "1", "max_slots": 3, "max_len": 240, "max_queue": 4096}
    folder = listed(frequent())
    with Engine.load(checkpoints("tiny-llama3"), draft=folder, speculation=config(SIZE), **options) as engine:
        widest(engine)
        yield Rig(engine, Watch(engine), references["tiny-llama3"], references["near"])


def test_greedy_text_is_the_reference_text(trimmed, goldens):
    """A22, also where the next token lies outside the draft's vocabulary."""
    jobs = [Job(goldens[name].ids, greedy(64), gamma) for gamma in (4, 3) for name in ("p1", "p7", "p33", "p150")]
    done = [trimmed.run(*jobs[1]), *trimmed.run_all(jobs)]
    for job, completion in zip([jobs[1], *jobs], done, strict=True):
        golden = next(golden for golden in goldens.values() if golden.ids == job.prompt)
        assert list(completion.token_ids) == golden.greedy
    ids = set(frequent()[:SIZE])
    outside = [token for golden in goldens.values() for token in golden.greedy if token not in ids]
    assert outside
    assert trimmed.engine.loads().counters.num_accepted_tokens > 30


def test_accepted_drafts_lie_inside_and_the_text_follows_the_targets_law(trimmed):
    """A02 with q over fewer ids than p: what q cannot say comes from the residual."""
    rng = np.random.default_rng(5)
    options = {"max_tokens": 41, "temperature": 1.0, "ignore_eos": True}
    jobs = [Job(rng.integers(0, 490, size=5).tolist(), SamplingParams(seed=seed, **options), 4) for seed in range(40)]
    streams = trimmed.chunks(jobs)
    ids = set(frequent()[:SIZE])
    drafts = [
        token
        for chunks in streams
        for chunk in chunks
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True)
        if origin == "draft"
    ]
    assert len(drafts) > 200
    assert set(drafts) <= ids
    ranks = Ranks(trimmed, jobs, streams)
    for offset, at_least in ((0, 300), (1, 150), (2, 80)):
        ranks.assert_uniform(offset, at_least)
    assert abs(ranks.z) < 5


@pytest.mark.parametrize(
    ("ids", "size", "words"),
    [
        (None, 513, "draft_vocab_size: expected at most [0-9]+, the ids that draft and target know, got 513"),
        (None, 64, "draft_vocab_size: expected an integer >= 65"),
        ("{", 70, "draft_vocab.json: expected a JSON list"),
        ({"0": 1}, 70, "expected a JSON list of token ids, most frequent first"),
        ([1.5] * 70, 70, "expected a JSON list of token ids"),
        ([*range(70), -1], 70, "expected ids from 0 to [0-9]+, got -1"),
        ([*range(70), 3], 70, "expected each id once, got 1 repetitions"),
        (list(range(69)), 70, "expected at least draft_vocab_size=70 ids, got 69"),
    ],
)
def test_a_size_or_a_list_that_does_not_fit_is_refused(ids, size, words, checkpoints, listed):
    folder = checkpoints("near") if ids is None else listed(ids)
    with pytest.raises(UserError, match=words):
        Engine.load(checkpoints("tiny-llama3"), draft=folder, speculation=config(size), mesh="1", max_len=61)
