"""A seeded request gives the same tokens alone, in any company and in any slot.

After any traffic, beside rows without a seed, and at every concurrency: tests/lossless/test_faults.py.
"""

import dataclasses

import numpy as np
import pytest

from jaxspec import Completion, SamplingParams
from tests.engine.conftest import Job


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
