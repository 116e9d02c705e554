"""Log-probabilities are the target's, for drafts, corrections and bonus tokens alike, each with its own token."""

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.engine.conftest import Job, Rig, greedy
from tests.engine.laws import batched

CLOSE = 1e-3


def assert_own(rig: Rig, jobs: list[Job], finished) -> None:
    """Every entry is the reference's log-softmax, before bans and filters, at its own place in the text."""
    logits = batched(rig.reference, [[*job.prompt, *done.token_ids] for job, done in zip(jobs, finished, strict=True)])
    for job, done, own_TV in zip(jobs, finished, logits, strict=True):
        count = job.sampling.logprobs
        if count is None:
            assert done.logprobs is None
            continue
        assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
        for place, entry in enumerate(done.logprobs, len(job.prompt) - 1):
            law_V = own_TV[place] - np.log(np.exp(own_TV[place] - own_TV[place].max()).sum()) - own_TV[place].max()
            assert entry.logprob == pytest.approx(law_V[entry.token_id], abs=CLOSE)
            assert [x for _, x in entry.top] == pytest.approx(np.sort(law_V)[::-1][:count], abs=CLOSE)
            assert [x for _, x in entry.top] == pytest.approx(law_V[[i for i, _ in entry.top]], abs=CLOSE)


@pytest.mark.parametrize("drafter", ["near_draft", "loop"])
def test_they_do_not_depend_on_speculation(drafter, goldens, request):
    """G13: numbers of plain decoding, whatever drafted."""
    rig: Rig = request.getfixturevalue(drafter)
    jobs = [Job(goldens["p33"].ids, greedy(40, logprobs=5), gamma) for gamma in (0, 1, 4, 8)]
    finished = [rig.run(*job) for job in jobs]
    assert_own(rig, jobs, finished)
    plain = [entry.logprob for entry in finished[0].logprobs or ()]
    for done in finished[1:]:
        assert done.token_ids == finished[0].token_ids
        assert [entry.logprob for entry in done.logprobs or ()] == pytest.approx(plain, abs=CLOSE)
    assert min(plain) < -0.1
    if drafter == "near_draft":
        assert {"draft", "correction", "bonus"} <= {origin for done in finished for origin in done.origins}


def test_rows_that_end_at_different_steps_keep_their_own(near_draft, goldens):
    """G15: sampled, filtered and banned rows with and without log-probabilities, of different lengths, at once."""
    jobs = [
        Job(
            goldens[("p7", "p33", "p1")[i % 3]].ids,
            SamplingParams(
                max_tokens=3 + 5 * i,
                min_tokens=2,
                seed=i,
                temperature=0.8,
                top_k=20 * (i % 2),
                logprobs=(None, 0, 3, 8)[i % 4],
            ),
            (4, 8, 2)[i % 3],
        )
        for i in range(12)
    ]
    assert_own(near_draft, jobs, near_draft.run_all(jobs))
