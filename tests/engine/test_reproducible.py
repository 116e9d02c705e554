"""A seeded request gives the same tokens alone, in any company, in any slot, after anything."""

import dataclasses

import numpy as np
import pytest

from jaxspec import Completion, SamplingParams
from tests.engine.conftest import MAX_LEN, Job, greedy
from tests.engine.laws import Ranks


def mixed_jobs(goldens) -> list[Job]:
    """Eight seeded requests of several lengths, gammas and filters."""
    names = ("p7", "p33", "p1", "p150", "p7", "p33", "p7", "p1")
    options = [
        {"temperature": 2.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 40},
        {"temperature": 0.3},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.1},
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    ]
    return [
        Job(goldens[name].ids, SamplingParams(max_tokens=23, seed=2**63 + 7 * i, ignore_eos=True, **chosen), gamma)
        for i, (name, chosen, gamma) in enumerate(zip(names, options, (4, 8, 1, 2, 7, 0, 3, 5), strict=True))
    ]


@pytest.mark.parametrize("drafter", ["ngram", "near_draft"])
def test_company_slot_and_order_change_nothing(drafter, goldens, request):
    """A15, A28: alone, again, all at once, in reverse and among strangers, at T > 0 and every gamma."""
    rig = request.getfixturevalue(drafter)
    jobs = mixed_jobs(goldens)
    alone = [rig.run(*job).token_ids for job in jobs]
    assert [rig.run(*job).token_ids for job in jobs[:3]] == alone[:3]
    assert [done.token_ids for done in rig.run_all(jobs)] == alone
    assert [done.token_ids for done in rig.run_all(jobs[::-1])] == alone[::-1]
    strangers = [job._replace(sampling=dataclasses.replace(job.sampling, seed=5)) for job in jobs]
    order = np.random.default_rng(1).permutation(16)
    crowd = rig.run_all([(jobs + strangers)[i] for i in order])
    assert [crowd[list(order).index(i)].token_ids for i in range(8)] == alone
    assert len(set(alone)) == 8


def test_seeds_that_differ_in_either_word_differ(ngram, goldens):
    """Seeds are 64 bits: none is cut, and 0 is a seed."""
    texts = {
        ngram.run(goldens["p7"].ids, SamplingParams(max_tokens=17, seed=seed, ignore_eos=True)).token_ids
        for seed in (0, 1, 2**32, 2**32 + 1, 2**64 - 1)
    }
    assert len(texts) == 5


def test_unseeded_and_seeded_rows_share_a_batch(near_draft, goldens):
    """A16: the seeded row is its solo run; the others report the seed that repeats them."""
    cool = SamplingParams(max_tokens=29, temperature=0.1, ignore_eos=True)
    seeded = dataclasses.replace(cool, seed=1)
    jobs = [Job(goldens["p7"].ids, cool), Job(goldens["p7"].ids, seeded), Job(goldens["p33"].ids, cool)]
    for job, done in zip(jobs, near_draft.run_all(jobs), strict=True):
        again = dataclasses.replace(cool, seed=done.summary.seed)
        assert near_draft.run(job.prompt, again).token_ids == done.token_ids
        assert job.sampling.seed in (None, done.summary.seed)


def test_rows_among_padding_keep_their_own_parameters(ngram, goldens):
    """A18: slots 0 and 1 fall idle, then 5 and 3 carry on alone among six rows of padding."""
    long = SamplingParams(max_tokens=101, seed=3, temperature=0.7, ignore_eos=True)
    jobs = [Job(goldens["p7"].ids, dataclasses.replace(long, seed=seed)) for seed in range(6)]
    alone = {seed: ngram.run(*jobs[seed]).token_ids for seed in (3, 5)}
    with ngram.watch.recording() as steps:
        streams = [ngram.start(job) for job in jobs]
        first = {seed: [next(streams[seed]), next(streams[seed])] for seed in range(6)}  # all run by now
        for seed in (0, 1, 2, 4):
            streams[seed].close()  # pyright: ignore
        for seed in (3, 5):
            assert Completion.of([*first[seed], *streams[seed]]).token_ids == alone[seed]
    together = [sorted(row.slot for row in rows) for rows in steps if len(rows) == 2]
    assert together.count([3, 5]) > 5


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_concurrency_leaves_tokens_and_their_probability_alone(temperature, near_draft, goldens):
    """A29: 1, 2, 4 and 8 at once; the text is as probable under the target as text of the target is."""
    sampling = SamplingParams(max_tokens=31, temperature=temperature, ignore_eos=True)
    jobs = [Job(goldens["p7"].ids, dataclasses.replace(sampling, seed=seed), 4) for seed in range(8)]
    texts = {}
    for concurrency in (1, 2, 4, 8):
        batches = [jobs[i : i + concurrency] for i in range(0, 8, concurrency)]
        texts[concurrency] = [done.token_ids for batch in batches for done in near_draft.run_all(batch)]
    assert texts[1] == texts[2] == texts[4] == texts[8]
    if temperature > 0:
        assert abs(Ranks(near_draft, jobs, near_draft.chunks(jobs)).z) < 5


@pytest.mark.parametrize("drafter", ["ngram", "self_draft"])
def test_a_canary_sings_the_same_after_any_traffic(drafter, goldens, request):
    """A30: long, sampled, filtered, stopped and aborted requests, then the canary in every slot."""
    rig = request.getfixturevalue(drafter)
    canary = Job(goldens["p7"].ids, greedy(37), 4)
    assert list(rig.run(*canary).token_ids) == goldens["p7"].greedy[:37]
    long_prompt = (goldens["p150"].ids * 2)[: MAX_LEN - 1]
    traffic = [
        *mixed_jobs(goldens),
        Job(long_prompt, SamplingParams(temperature=3.0, seed=1)),
        Job(goldens["p33"].ids, SamplingParams(max_tokens=40, top_k=2, min_tokens=20, stop=("e", "a"), seed=2)),
        Job(goldens["p7"].ids, SamplingParams(max_tokens=40, stop_token_ids=tuple(range(16)), logprobs=8, seed=3)),
    ]
    streams = [rig.start(job) for job in traffic * 2]
    for index, stream in enumerate(streams):
        if index % 3 == 0:
            next(stream)
            stream.close()  # pyright: ignore
    for index, stream in enumerate(streams):
        if index % 3:
            list(stream)
    assert [list(done.token_ids) for done in rig.run_all([canary] * 24)] == [goldens["p7"].greedy[:37]] * 24
    rig.assert_idle()
