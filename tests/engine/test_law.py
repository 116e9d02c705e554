"""Sampled text follows the target's exact law on the running engine, whatever drafts it.

Every chi-square here is at a false-alarm rate of 1e-6 (tests/speculate/oracle.py), and there are fewer than 60, so the
chance that a change of the random numbers alone turns this file red is below 1e-4. Seeds are fixed. Laws are computed
in float64 from reference logits, all 512 ids.
"""

import itertools

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.engine.conftest import Job
from tests.engine.laws import Ranks, batched, law
from tests.speculate.oracle import assert_follows

OPTIONS = {
    "t1": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 11},
    "top_p": {"temperature": 0.7, "top_p": 0.8},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
}


def sampling(count: int, seed: int, **options: float) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, ignore_eos=True, **options)  # pyright: ignore


def prompts(count: int, size: int) -> list[list[int]]:
    rng = np.random.default_rng(43)
    return rng.integers(0, 490, size=(count, size)).tolist()


@pytest.mark.parametrize("options", OPTIONS)
def test_every_position_of_a_round_follows_the_target(options, near_draft):
    """A02, A14: drafts, corrections and the bonus of rounds of four, drawn and judged under the same filters."""
    jobs = [Job(p, sampling(41, seed, **OPTIONS[options]), 4) for seed, p in enumerate(prompts(80, 5))]
    ranks = Ranks(near_draft, jobs, near_draft.chunks(jobs))
    for offset, at_least in ((0, 400), (1, 300), (2, 200), (3, 150), (4, 90)):
        ranks.assert_uniform(offset, at_least)
    assert abs(ranks.z) < 5


def test_a_poor_draft_is_corrected_by_the_residual(far_draft):
    """A03: most drafts are rejected, so most tokens come from max(p - q, 0). One draft a round: none takes a rest."""
    jobs = [Job(p, sampling(61, seed, temperature=2.0), 1) for seed, p in enumerate(prompts(40, 5))]
    ranks = Ranks(far_draft, jobs, far_draft.chunks(jobs))
    ranks.assert_uniform(0, 1200)
    ranks.assert_uniform(1, 400)


# Without filters: tests/lossless.
COPIED = {
    "top_k": ({"temperature": 1.0, "top_k": 4}, 1, {0: 700, 1: 200}),
    "top_p": ({"temperature": 0.7, "top_p": 0.6}, 4, {"plain": 500, 0: 150, 1: 80, 2: 40}),
}


@pytest.mark.parametrize("case", COPIED)
def test_copied_drafts_are_judged_by_the_target_alone(case, loop):
    """A10: lookups are not drawn; p loses what it rejects. With one draft a round, no round is followed by a rest."""
    options, gamma, offsets = COPIED[case]
    jobs = []
    for seed, prompt in enumerate(prompts(12, 5)):
        long = [*prompt, *loop.run(prompt, sampling(150, seed, **options), 0).token_ids]
        jobs += [Job(long, sampling(60, 1000 + 16 * seed + i, **options), gamma) for i in range(3)]
    ranks = Ranks(loop, jobs, loop.chunks(jobs))
    for offset, at_least in offsets.items():
        ranks.assert_uniform(offset, at_least)


def test_a_draft_that_is_the_target_is_always_accepted(self_draft):
    """A04, A14: p = q leaves no residual. High temperature, all offsets alike, the bonus too."""
    jobs = [Job(p, sampling(41, seed, temperature=1.5), 4) for seed, p in enumerate(prompts(40, 5))]
    before = self_draft.engine.loads().counters
    ranks = Ranks(self_draft, jobs, self_draft.chunks(jobs))
    after = self_draft.engine.loads().counters
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert accepted > 0.999 * drafted > 500
    for offset in range(5):
        ranks.assert_uniform(offset, 250)


def test_the_first_three_tokens_after_one_prompt_have_the_exact_joint_law(near_draft):
    """The plain picture: 27 outcomes of top_k=3, counted over 600 seeds that stream through the slots."""
    prompt = prompts(1, 5)[0]
    options = {"temperature": 0.9, "top_k": 3}
    jobs = [Job(prompt, sampling(3, seed, **options), 4) for seed in range(600)]
    counts: dict[tuple[int, ...], int] = {}
    for done in near_draft.run_all(jobs):
        counts[done.token_ids] = counts.get(done.token_ids, 0) + 1

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        logits = batched(near_draft.reference, [[*prompt, *prefix] for prefix in expected])
        expected = {
            (*prefix, int(token)): chance * p_V[token]
            for (prefix, chance), own in zip(expected.items(), logits, strict=True)
            for p_V in [law(own[-1], sampling(3, 0, **options))]
            for token in np.flatnonzero(p_V)
        }
    assert set(counts) <= set(expected)
    assert_follows([counts.get(outcome, 0) for outcome in expected], list(expected.values()))


def test_the_chi_square_would_see_a_law_that_is_slightly_off(near_draft):
    """Its power: the draft's own text, taken for the target's, is told apart at every filter."""
    jobs = [Job(p, sampling(41, seed, temperature=1.0), 0) for seed, p in enumerate(prompts(8, 5))]
    streams = near_draft.chunks(jobs)
    swapped = type(near_draft)(near_draft.engine, near_draft.watch, near_draft.draft, near_draft.reference)
    assert list(itertools.chain.from_iterable(streams))
    with pytest.raises(AssertionError, match="chi-square"):
        Ranks(swapped, jobs, streams).assert_uniform("plain", 300)
