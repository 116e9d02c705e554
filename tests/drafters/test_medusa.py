"""Medusa on the running engine: the authors' trace, and the target's text at its vocabulary.

The likeliest candidates, as the authors have it; ``test_medusa_drawn.py`` has those that are drawn. In company,
cancelled, cut and always wrong: tests/lossless.
"""

import itertools

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.drafters.parity import follow, traces
from tests.engine.conftest import WIDE_MAX_LEN, Job, Rig, greedy
from tests.engine.laws import Ranks

NAMES = ("p1", "p7", "p33", "p150")


@pytest.fixture(scope="module")
def medusa(heads_rig, shared) -> Rig:
    """The authors' tree of 63 drafts, four levels."""
    choices = np.load(shared / "fixtures" / "medusa" / "goldens.npz")["buffers__choices"]
    tree = [[int(rank) for rank in path if rank >= 0] for path in choices]
    options = {"max_slots": 1, "max_len": WIDE_MAX_LEN}  # 64 nodes a row are slow
    return heads_rig("medusa", options, gammas=True, tree_choices=tree, draft_sample_method="greedy")


@pytest.mark.parametrize("prompt", ["p7", "p33", "p150"])
def test_every_round_is_the_authors_round(medusa, shared, prompt):
    """All 64 nodes of every step, what was accepted, and the text."""
    trace = traces(shared / "fixtures" / "medusa")[prompt]
    rounds = follow(medusa, trace)
    assert [step.tokens for step in rounds] == [step.tokens for step in trace.steps]
    assert [step.accepted for step in rounds] == [step.accepted for step in trace.steps]
    assert {step.accepted for step in rounds} >= {0, 1, 2, 3}  # p7 and p150 reach 4, the tree's depth


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
def test_alone_every_gamma_gives_the_reference_text(medusa, goldens, gamma):
    for name in NAMES:
        with medusa.watch.recording() as steps:
            done = medusa.run(goldens[name].ids, greedy(64), gamma)
        assert list(done.token_ids) == goldens[name].greedy, name
        rows = [row for rows in steps for row in rows]
        assert max(row.accepted for row in rows) <= min(gamma, 4)
        assert gamma == 0 or any(row.accepted for row in rows)
        assert {row.drafted for row in rows} <= {0, 10, 38, 61, 63}  # whole levels of the tree


def test_the_end_of_the_context_is_reached_without_drafts_that_have_no_room(medusa):
    """The last 64 slots cannot hold the tree: plain steps to the very last token."""
    prompt = np.random.default_rng(5).integers(0, 490, size=220).tolist()
    plain = medusa.run(prompt, greedy(None), 0)
    with medusa.watch.recording() as steps:
        done = medusa.run(prompt, greedy(None), 4)
    assert (done.finish_reason, len(done.token_ids)) == ("length", 80)
    assert medusa.same_text(Job(prompt, greedy(None)), done.token_ids, plain.token_ids) == 0
    assert {row.drafted > 0 for rows in steps for row in rows} == {True, False}


def test_stop_ids_are_not_drafted_while_they_are_banned(medusa, goldens):
    """min_tokens: a stop token in the middle of a tree is neither drafted nor said before it."""
    golden = goldens["p33"]
    stops = tuple(golden.greedy[9:21])
    sampling = greedy(40, stop_token_ids=stops, min_tokens=17)
    plain = medusa.run(golden.ids, sampling, 0)
    assert not set(plain.token_ids[:16]) & set(stops)
    assert medusa.run(golden.ids, sampling, 4).token_ids == plain.token_ids


def test_sampled_text_follows_the_target(medusa):
    """A tree of undrawn drafts, by block; the false-alarm rate is that of test_law.py."""
    rng = np.random.default_rng(43)
    jobs = []
    for seed in range(24):
        for options in ({"temperature": 0.5}, {"temperature": 1.0, "top_k": 7}):
            sampling = SamplingParams(max_tokens=61, seed=seed, ignore_eos=True, **options)  # pyright: ignore
            jobs.append(Job(rng.integers(0, 490, size=5).tolist(), sampling, 4))
    ranks = Ranks(medusa, jobs, medusa.chunks(jobs))
    assert ranks.sizes[0] > 2000
    assert ranks.sizes[1] > 100
    ranks.assert_uniform("all", 2100)
    assert abs(ranks.z) < 5


def test_the_coupled_law_gives_the_plain_text_at_any_temperature(heads_rig, goldens):
    """Alone, token for token, with drafts that are chosen with the noise of their positions."""
    rig = heads_rig("medusa", {"max_slots": 1}, rejection_sample_method="coupled")
    accepted = 0
    cases = itertools.product(goldens, (0.0, 0.3, 0.7, 1.0))
    for seed, (name, temperature) in enumerate(cases):
        golden = goldens[name]
        prompt = [*golden.ids[-9:], *golden.greedy[: 2 * seed]]
        job = Job(prompt, SamplingParams(max_tokens=19, temperature=temperature, seed=seed, ignore_eos=True), 8)
        done = rig.run(*job)
        assert done.token_ids == rig.run(*job._replace(gamma=0)).token_ids
        accepted += done.summary.speculation.num_accepted_draft_tokens if temperature > 0 else 0
    assert accepted > 10


def test_a_mesh_of_four_drafts_and_says_the_same(heads_rig, goldens):
    rig = heads_rig("medusa", {"mesh": "4", "max_slots": 2})
    assert list(rig.run(goldens["p7"].ids, greedy(64)).token_ids) == goldens["p7"].greedy
    jobs = [Job(goldens[name].ids, greedy(64), gamma) for name, gamma in (("p7", 5), ("p1", 2), ("p7", 0))]
    for job, done in zip(jobs, rig.run_all(jobs), strict=True):
        assert list(done.token_ids) in [golden.greedy for golden in goldens.values() if golden.ids == job.prompt]
    assert rig.engine.loads().counters.num_accepted_tokens > 0
