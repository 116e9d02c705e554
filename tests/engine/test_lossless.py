"""Greedy text does not depend on speculation: no drafter, no gamma, no neighbour and no mesh changes a token."""

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.engine.conftest import Job, Rig, greedy

DRAFTERS = ("ngram", "self_draft", "near_draft")
PROMPTS = ("p1", "p7", "p33", "p150")


def jobs_of(goldens, gammas):
    """Every prompt with every gamma; neighbours differ in both."""
    names = [PROMPTS[(i + j) % len(PROMPTS)] for i in range(len(PROMPTS)) for j in range(len(gammas))]
    return names, [Job(goldens[name].ids, greedy(64), gammas[i % len(gammas)]) for i, name in enumerate(names)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_alone_every_gamma_gives_the_reference_text(drafter, goldens, request):
    rig: Rig = request.getfixturevalue(drafter)
    for gamma in range(9):
        for name in PROMPTS if gamma in (0, 8) else PROMPTS[1:2]:
            done = rig.run(goldens[name].ids, greedy(64), gamma)
            assert list(done.token_ids) == goldens[name].greedy, (name, gamma)
            assert done.summary.speculation.num_spec_steps == 0 or gamma > 0
    rig.assert_idle()


@pytest.mark.parametrize("drafter", [*DRAFTERS, "tiny_draft"])
def test_together_mixed_lengths_and_gammas_give_the_reference_text(drafter, goldens, request):
    """A22, A28: requests of four lengths and all gammas stream through the slots; windows grow, of one engine."""
    rig: Rig = request.getfixturevalue(drafter)
    names, jobs = jobs_of(goldens, (8, 0, 2, 7) if drafter == "tiny_draft" else (1, 2, 3, 4, 5, 6, 7, 8))
    for name, job, done in zip(names, jobs, rig.run_all(jobs), strict=True):
        assert list(done.token_ids) == goldens[name].greedy, (name, job.gamma)
    if drafter in ("self_draft", "near_draft"):
        accepted = rig.engine.loads().counters.num_accepted_tokens_per_pos
        assert all(accepted[: 8 if drafter == "self_draft" else 4]), "no draft was accepted at some position"


def loops(rig: Rig) -> list[list[int]]:
    """Prompts whose own greedy continuation follows twice, so that lookups find it."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 490, size=size).tolist() for size in (5, 7, 11, 13)]
    return [[*p, *done.token_ids, *p, *done.token_ids] for p in prompts for done in [rig.run(p, greedy(31), 0)]]


def test_lookups_that_succeed_give_the_plain_text_in_fewer_passes(loop):
    """A22 on text that repeats itself, alone and in a full batch, every gamma; near-ties are counted."""
    prompts = loops(loop)
    texts = {tuple(p): loop.run(p, greedy(61), 0).token_ids for p in prompts}
    near_ties = accepted = 0
    for gamma in range(1, 9):
        for prompt in prompts[:2]:
            done = loop.run(prompt, greedy(61), gamma)
            near_ties += loop.same_text(Job(prompt, greedy(61)), done.token_ids, texts[tuple(prompt)])
            accepted += done.summary.speculation.num_accepted_draft_tokens
            assert gamma == 1 or done.summary.speculation.mean_acceptance_length > 1.5
    jobs = [Job(prompt, greedy(61), gamma) for gamma in range(9) for prompt in prompts]
    for job, done in zip(jobs, loop.run_all(jobs), strict=True):
        near_ties += loop.same_text(job, done.token_ids, texts[tuple(job.prompt)])
        accepted += done.summary.speculation.num_accepted_draft_tokens
    assert accepted > 16 * 20
    assert near_ties <= 2


def test_a_mesh_of_four_gives_the_reference_text(mesh4, near_draft, goldens):
    """A17: the tokens are one device's, alone and together, sampled too; heads, ffn and vocabulary are split."""
    assert mesh4.engine.server_info().mesh == {"data": 1, "model": 4}
    assert list(mesh4.run(goldens["p7"].ids, greedy(64), 4).token_ids) == goldens["p7"].greedy
    names = ("p7", "p1", "p7", "p33")
    jobs = [Job(goldens[name].ids, greedy(64), gamma) for name, gamma in zip(names, (4, 3, 0, 4), strict=True)]
    for name, done in zip(names, mesh4.run_all(jobs), strict=True):
        assert list(done.token_ids) == goldens[name].greedy, name
    assert mesh4.engine.loads().counters.num_accepted_tokens > 0
    sampled = [
        Job(goldens["p7"].ids, SamplingParams(max_tokens=40, temperature=0.7, seed=seed, ignore_eos=True), 4)
        for seed in range(4)
    ]
    on_one = [done.token_ids for done in near_draft.run_all(sampled)]
    assert [done.token_ids for done in mesh4.run_all(sampled)] == on_one


def test_the_reference_is_the_reference(references, shared):
    """The float64 model that other tests here trust gives the fixtures' logits and greedy text."""
    for name in ("tiny-llama3", "tiny-draft"):
        data = np.load(shared / "fixtures" / name / "goldens.npz")
        for prompt in ("p7", "p33"):
            logits = references[name].logits([data[f"{prompt}__input_ids"]])[0]
            assert np.abs(logits - data[f"{prompt}__logits"]).max() < 1e-4
