"""Rounds at their limits: all accepted, none, of another depth each time, cut in the middle, and cancelled.

The watch checks every row's lengths after every step, of the target's cache and of the drafter's. Most of it is greedy,
where the plain text is the only right one.
"""

import random

import pytest

from jaxspec import SamplingParams
from jaxspec.speculate.step import Params
from tests.engine.conftest import Job, greedy
from tests.engine.watch import Row
from tests.lossless.cases import CASES, DRAFTERS, LEVELS, MAX_LEN, NODES, Case, SmallRig, scaled
from tests.lossless.models import DRAFTED, after
from tests.lossless.texts import Texts, greedy_jobs, sampled_jobs

SPECULATING = [Case(drafter, "block") for drafter in DRAFTERS if drafter != "none"]
every_drafter = pytest.mark.parametrize("case", SPECULATING, ids=str)


def cycle(start: int, count: int) -> list[int]:
    """``count`` tokens of the cycle that the sure target goes round in."""
    successor, found = after(), [start % DRAFTED]
    while len(found) < count:
        found.append(int(successor[found[-1]]))
    return found


def twice_round(start: int) -> list[int]:
    """A prompt of two rounds, in which a lookup finds what comes next."""
    return cycle(start, 2 * DRAFTED)


def with_room(rig: SmallRig, steps: list[list[Row]]) -> list[Row]:
    """The rows that began their step with room for every node."""
    drafter = rig.engine.programs.decoder.drafter
    nodes = max(NODES, drafter.drafts(LEVELS) + drafter.window(LEVELS))
    return [row for rows in steps for row in rows if row.length - len(row.tokens) + nodes <= MAX_LEN]


@every_drafter
def test_drafts_that_are_right_are_accepted_in_every_round(case: Case, rig: SmallRig):
    """B01, B17, B18: at every gamma, after rests of any length, at T = 0 and (A21) as it goes to 0."""
    rig.use(rig.sure)
    rests = iter([3, 3, 0, 0, 0, 0, 3, 1, 3, 2, 0, 3] * 9)

    def rest(batch, running) -> None:
        for request in running.values():
            request.gamma = next(rests)

    prompt = twice_round(5)
    text = cycle(5, MAX_LEN)[len(prompt) :]
    for temperature in (0.0, 1e-6, 0.01):
        sampling = SamplingParams(max_tokens=MAX_LEN, temperature=temperature, seed=1, ignore_eos=True)
        # Up to the whole bucket: after that the last draft was never fed back to a draft model.
        for gamma in range(1, rig.engine.programs.shapes.gammas[-1] + 1):
            with rig.watch.recording() as steps:
                assert list(rig.run(prompt, sampling, gamma).token_ids) == text
            assert {row.accepted for row in with_room(rig, steps)} == {gamma}
    with rig.watch.recording() as steps, rig.watch.meddling(rest):
        assert list(rig.run(prompt, greedy(None), 3).token_ids) == text
    rounds = with_room(rig, steps)
    assert {row.gamma for row in rounds} == {0, 1, 2, 3}
    assert all(row.accepted == row.gamma for row in rounds)


# The drafts of the others come from the text itself.
@pytest.mark.parametrize(
    "case", [case for case in SPECULATING if DRAFTERS[case.drafter][0] and "hybrid" not in case.drafter], ids=str
)
def test_drafts_that_are_wrong_cost_passes_alone(case: Case, rig: SmallRig, plain: Texts):
    """B04: next to nothing is accepted, and nothing of what is not stays in a cache."""
    name = "fc" if case.drafter.startswith("eagle-") else "lm_head"  # EAGLE-1 speaks through the target's head
    wrong = scaled(rig.sure.drafter, name, -1.0)
    rig.use(Params(rig.blurry.target, wrong))
    completions = rig.run_all(greedy_jobs())
    for job, expected, done in zip(greedy_jobs(), plain.greedy, completions, strict=True):
        assert rig.same_text(job, done.token_ids, expected) == 0
    counts = [done.summary.speculation for done in completions]
    # Heads do not see all that the target sees, so the least likely token may come after all.
    accepted = sum(count.num_accepted_draft_tokens for count in counts)
    allowed = 0.005 * sum(count.num_draft_tokens for count in counts)
    assert accepted <= (0 if case.drafter == "draft_model" else allowed)
    assert min(count.num_spec_steps for count in counts) > 10


@pytest.mark.parametrize("case", [case for case in CASES if case.law != "token" and case.drafter != "none"], ids=str)
def test_a_depth_that_changes_every_step_changes_no_text(case: Case, rig: SmallRig, plain: Texts):
    """B02, B17: each row draws its own gamma for each step. Greedy; sampled under the coupled law."""
    rng = random.Random(7)

    def change(batch, running) -> None:
        for request in running.values():
            request.gamma = rng.randint(0, LEVELS)

    asked = {"greedy": (greedy_jobs(), plain.greedy)}
    if case.law == "coupled":
        asked = {options: (sampled_jobs(options), texts) for options, texts in plain.sampled.items()}
    for jobs, texts in asked.values():
        with rig.watch.recording() as steps, rig.watch.meddling(change):
            done = rig.run_all(jobs[:16])
        assert [completion.token_ids for completion in done] == texts[:16]
        assert {row.gamma for rows in steps for row in rows} == set(range(LEVELS + 1))
        assert any(len({row.gamma for row in rows}) > 2 for rows in steps)


@every_drafter
def test_a_row_may_end_in_the_middle_of_what_was_accepted(case: Case, rig: SmallRig):
    """B03: by a stop token at every depth and by every small budget; the others go on, the slots serve the next."""
    rig.use(rig.sure)
    prompt = twice_round(3)
    text = cycle(3, MAX_LEN)[len(prompt) :]
    stops = [Job(prompt, greedy(None, stop_token_ids=(text[place],)), LEVELS) for place in range(1, 8)]
    budgets = [Job(prompt, greedy(count), LEVELS) for count in range(1, 9)]
    with rig.watch.recording() as steps:
        done = rig.run_all([*stops, Job(prompt, greedy(None), LEVELS), *budgets, *stops])
    ends = [*range(2, 9), len(text), *range(1, 9), *range(2, 9)]
    assert [list(completion.token_ids) for completion in done] == [text[:end] for end in ends]
    assert any(len(row.tokens) <= row.accepted for rows in steps for row in rows), "no stop cut an accepted run"


@every_drafter
def test_a_cancelled_rows_slot_is_used_again_at_once(case: Case, rig: SmallRig, plain: Texts):
    """B03: streams close after any number of chunks beside rows that go on; whoever comes next has the plain text."""
    jobs = greedy_jobs()
    long = [rig.start(job) for job in jobs[:2]]
    for taken in range(4):
        doomed = [rig.start(job) for job in jobs[2:9]]
        for stream in doomed:
            for _ in range(taken):
                next(stream)
            stream.close()  # pyright: ignore
        fresh = jobs[9 + taken]
        assert rig.same_text(fresh, rig.run(*fresh).token_ids, plain.greedy[9 + taken]) == 0
    for job, stream, expected in zip(jobs, long, plain.greedy, strict=False):
        assert rig.same_text(job, [token for chunk in stream for token in chunk.token_ids], expected) == 0
