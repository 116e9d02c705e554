"""Caches: what each row holds after every step, whatever was accepted, cut, cancelled or skipped.

The lengths are checked by the watch (watch.py) after each step of every test here; these tests make the steps that
matter happen, and compare what is in the slots with a fresh prefill.
"""

import jax
import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.engine.batch import Batch, Prefill, catch_up
from jaxspec.engine.request import Request, StepTokens
from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.programs import Programs
from jaxspec.speculate.state import LENGTH
from tests.engine.conftest import DRAFT_CONTEXT, MAX_LEN, Job, Rig, greedy

CLOSE = 1e-4  # keys and values of float32 passes of different widths


def held(state, row: int) -> list[tuple[np.ndarray, int]]:
    """Every cache array of a row, [K, S, H], with how many slots are valid."""
    caches = [cache for cache in (state.target, state.drafter) if hasattr(cache, "layers")]
    return [
        (np.asarray(array)[row], int(cache.length_B[row]))
        for cache in caches
        for array in jax.tree.leaves(cache.layers)
    ]


class Driver:
    """Rows under the test's own gammas, through the engine's own Batch, without its thread."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.batch = Batch(programs)
        self.running: dict[int, Request] = {}

    def add(self, slot: int, prompt, *, largest_chunk: int = 64, max_length: int = MAX_LEN) -> Request:
        request = Request(
            str(slot), prompt, greedy(None), gamma=GAMMA_MAX, lookup=(1, 3), rests=True, seed=slot, stop_ids=(),
            max_length=max_length, method="test", tokenizer=None, sink=lambda item: None, deadline=None,
        )  # fmt: skip
        prefill = Prefill(self.programs, request)
        while (first := prefill.advance(largest_chunk)) is None:
            pass
        request.absorb(first)
        self.batch.insert(prefill.state, slot, dict(self.running))
        self.running[slot] = request
        return request

    def step(self, *gammas: int) -> dict[int, StepTokens]:
        """One step with a gamma for each row, in the order in which they came."""
        self.batch.fit(self.running)
        asked = dict(zip(self.running, gammas, strict=True))
        for slot, request in self.running.items():
            if asked[slot] > 0 and request.lag > 1:
                self.batch.catch_up(slot, request)
        results = self.batch.step(self.running, asked)
        for slot, result in results.items():
            assert isinstance(result, StepTokens)
            self.running[slot].absorb(result)
        return results  # pyright: ignore

    def fresh(self, tokens) -> list[tuple[np.ndarray, int]]:
        """The caches of a row that was just prefilled with these tokens and whose drafter caught up."""
        driver = Driver(self.programs)
        request = driver.add(0, tokens[:-1])
        row = catch_up(self.programs, driver.batch._state, request)  # pyright: ignore
        return held(row, 0)

    def assert_fresh(self, slot: int) -> None:
        """The row's valid slots hold what a prefill of its committed tokens would have put there."""
        tokens = self.running[slot].token_ids
        row = 0 if self.batch._lone is not None else slot
        for (got, length), (expected, _) in zip(held(self.batch._state, row), self.fresh(tokens), strict=True):
            assert len(tokens) - 2 <= length <= len(tokens) - 1
            assert np.abs(got[:, :length] - expected[:, :length]).max() < CLOSE


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 8])
def test_a_draft_that_is_the_target_is_accepted_in_every_round(gamma, self_draft, goldens):
    """B01: full acceptance, 200 tokens long: the draft takes in its own last proposal and the bonus."""
    with self_draft.watch.recording() as steps:
        done = self_draft.run(goldens["p33"].ids, greedy(200), gamma)
    assert len(done.token_ids) == 200
    rounds = [row for rows in steps for row in rows]
    assert [(row.drafted, row.accepted) for row in rounds if row.drafted != row.accepted] == []
    assert all(row.drafted == gamma for row in rounds[:-1])


@pytest.mark.parametrize("drafter", ["near_draft", "far_draft"])
def test_rejections_trim_exactly_and_leave_no_decay(drafter, goldens, request):
    """B02, B04: partial and hardly any acceptance; acceptance late in the text is what it was early."""
    rig: Rig = request.getfixturevalue(drafter)
    jobs = [Job(goldens[name].ids, SamplingParams(max_tokens=150, seed=i, ignore_eos=True), 1) for i, name in
            enumerate(("p7", "p33", "p1", "p7", "p33", "p1"))]  # fmt: skip
    with rig.watch.recording() as steps:
        rig.run_all(jobs)
    rows = [row for step in steps for row in step if row.drafted]
    assert {row.lag for row in rows if row.accepted < row.drafted} == {0}
    early = [row.accepted for row in rows if row.length < 70]
    late = [row.accepted for row in rows if row.length > 100]
    assert abs(np.mean(early) - np.mean(late)) < 0.15
    assert min(len(early), len(late)) > 100


@pytest.mark.parametrize("drafter", ["self_draft", "near_draft"])
def test_gammas_that_come_and_go_leave_no_holes(drafter, goldens, request):
    """B17, B18: gamma 4 -> 0 -> 4, others in between, and rests beside a row that drafts."""
    rig: Rig = request.getfixturevalue(drafter)
    driver = Driver(rig.engine.programs)
    driver.add(2, goldens["p7"].ids)
    driver.add(5, goldens["p33"].ids)
    together = [(4, 4), (4, 4), (0, 0), (0, 0), (0, 0), (0, 0), (4, 4), (4, 4)]
    apart = [(0, 0), (0, 0), (0, 8), (0, 8), (4, 0), (4, 4), (0, 0), (0, 0), (0, 0), (1, 0), (8, 0), (1, 8), (7, 3)]
    for gammas in together + apart:
        for gamma, (slot, result) in zip(gammas, driver.step(*gammas).items(), strict=True):
            assert result.n_drafted == gamma
            if drafter == "self_draft":
                assert result.n_accepted == gamma, f"slot {slot}: {result}"
            if gamma in (1, 8):
                driver.assert_fresh(slot)
    for slot, name in ((2, "p7"), (5, "p33")):
        request_ = driver.running[slot]
        made = request_.token_ids[request_.prompt_length :][:64]
        assert made == goldens[name].greedy[: len(made)]


@pytest.mark.parametrize("room", range(1, 10))
def test_the_step_itself_drafts_no_more_than_there_is_room_for(room, self_draft, goldens):
    """B06: whatever is asked of it, nothing is drafted or written past a row's end."""
    driver = Driver(self_draft.engine.programs)
    driver.add(0, goldens["p7"].ids, max_length=7 + 1 + room)
    (result,) = driver.step(8).values()
    assert (result.n_drafted, len(result.token_ids), result.finish) == (room - 1, room, LENGTH)
    assert driver.running[0].length == 7 + 1 + room


def test_a_row_that_rested_drafts_again_with_all_it_missed(near_draft, goldens):
    """B17: plain steps leave the draft behind; it catches up, and is as often right as before."""
    first, again = [], []
    for name in ("p7", "p33", "p1"):
        driver = Driver(near_draft.engine.programs)
        request = driver.add(0, goldens[name].ids)
        for _ in range(9):
            for _ in range(5):
                driver.step(0)
            assert request.lag > 1
            (result,) = driver.step(4).values()
            again.append(result.n_accepted)
            (result,) = driver.step(4).values()
            first.append(result.n_accepted)
    assert np.mean(again) > np.mean(first) - 0.8
    assert np.mean(again) > 1


def test_rows_at_rest_are_never_written(near_draft, goldens):
    """B16: a finished row in the middle of a batch keeps every slot bit for bit while its neighbours go on."""
    driver = Driver(near_draft.engine.programs)
    for slot, name in enumerate(("p7", "p33", "p1")):
        driver.add(slot, goldens[name].ids)
    driver.step(4, 4, 4)
    del driver.running[1]

    def at_rest():
        # A row keeps drafting into its own draft cache until its slot is taken; an empty one does not.
        return held(driver.batch._state, 1)[: 2 * driver.programs.decoder.target.config.num_layers] + held(
            driver.batch._state, 7
        )

    before = at_rest()
    for gamma in (4, 0, 8, 2):
        driver.step(gamma, gamma)
    for (was, length), (now, length_now) in zip(before, at_rest(), strict=True):
        assert length == length_now
        np.testing.assert_array_equal(was, now)
    driver.assert_fresh(0)
    driver.assert_fresh(2)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 33, 63, 64, 65, 80, 81, 128, 129, 200])
def test_any_chunking_of_a_prompt_gives_the_same_caches_and_first_token(size, near_draft):
    """B23, B24: prompts at the edges of chunks, with a random first token; drafts only after the last chunk."""
    prompt = np.random.default_rng(size).integers(0, 490, size=size).tolist()
    states = []
    for largest in (16, 64):
        driver = Driver(near_draft.engine.programs)
        request = driver.add(0, prompt, largest_chunk=largest)
        assert request.token_ids[size:] == [int(near_draft.reference.logits([prompt])[0, -1].argmax())]
        states.append(held(catch_up(near_draft.engine.programs, driver.batch._state, request), 0))  # pyright: ignore
    for (small, length), (large, length_large) in zip(*states, strict=True):
        assert length == length_large == size
        assert np.abs(small[:, :size] - large[:, :size]).max() < CLOSE


def test_past_the_drafts_context_the_row_goes_on_without_it(tiny_draft, goldens):
    """B10: the draft's limit is crossed while decoding, and by a prompt; windows grow on the way."""
    for prompt in (goldens["p150"].ids, goldens["p33"].ids * 6, [*goldens["p33"].ids * 6, 7, 11]):
        job = Job(prompt, greedy(90), 8)
        with tiny_draft.watch.recording() as steps:
            done = tiny_draft.run(*job)
        assert len(done.token_ids) == 90
        assert tiny_draft.same_text(job, done.token_ids, tiny_draft.run(prompt, greedy(90), 0).token_ids) == 0
        rows = [row for step in steps for row in step]
        assert not any(row.drafted for row in rows if row.length > DRAFT_CONTEXT + 9)
        assert len(prompt) > 190 or any(row.drafted for row in rows)
