"""Lookup first, the model where nothing matches: the plain text, whichever drafts, alone and beside the other kind."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from jaxspec import Engine, SamplingParams, SpeculationConfig
from jaxspec.engine.batch import Batch
from jaxspec.engine.request import Request
from jaxspec.errors import UserError
from tests.engine.conftest import Job, Rig, greedy
from tests.engine.laws import Ranks
from tests.engine.watch import Watch

SLOTS = 3


class Kinds:
    """Who drafts for each row, step by step: "copy", "model" or "none". Checks what the report says of the draft."""

    def __init__(self) -> None:
        self.steps: list[dict[str, str]] = []

    def __call__(self, batch: Batch, running: dict[int, Request]) -> None:
        state = batch._state
        assert state is not None
        found_B, ready = np.asarray(state.drafter.lookup.found_B), {}
        for slot, request in running.items():
            row = 0 if batch._lone is not None else slot
            if hasattr(state.drafter.model, "layers"):
                length = int(np.asarray(state.drafter.model.length_B)[row])
                assert request.lag == request.length - 1 - length >= 0
            drafts = min(request.next_gamma(), request.ready) > 0
            ready[request.request_id] = ("copy" if found_B[row] else "model") if drafts else "none"
        self.steps.append(ready)

    def count(self, *kinds: str) -> int:
        """Steps in which all of these occurred."""
        return sum(set(kinds) <= set(step.values()) for step in self.steps)


@pytest.fixture(scope="module")
def hybrid(references, checkpoints, variant) -> Iterator[Rig]:
    """A target whose text goes round in loops, and a draft that is a little off; three tokens make a match."""
    rng = np.random.default_rng(23)
    references["loop-near"] = variant(
        "loop-near", lambda name, x: x * (0.01 if "o_proj" in name else 1) + 0.005 * rng.standard_normal(x.shape)
    )
    # Under the block law an offset that was reached says something of the tokens before it: ranks by offset need token.
    config = SpeculationConfig(
        method="hybrid", rejection_sample_method="token", prompt_lookup_min=3, prompt_lookup_max=4
    )
    options = {"mesh": "1", "max_slots": SLOTS, "max_len": 240, "max_queue": 4096}
    with Engine.load(checkpoints("loop"), draft=checkpoints("loop-near"), speculation=config, **options) as engine:
        yield Rig(engine, Watch(engine), references["loop"], references["loop-near"])


def prompts(rig: Rig, copying: int, fresh: int) -> list[list[int]]:
    """Prompts whose own continuation follows twice, then some in which nothing repeats."""
    rng = np.random.default_rng(3)
    made = [rng.permutation(490)[:size].tolist() for size in (5, 7, 11, 13)[:copying]]
    made = [[*p, *done.token_ids, *p, *done.token_ids] for p in made for done in [rig.run(p, greedy(23), 0)]]
    return made + [rng.permutation(490)[: 9 + 4 * index].tolist() for index in range(fresh)]


def test_alone_every_gamma_gives_the_plain_text(hybrid):
    """A22: a row that copies, and one that drafts and then copies its own loops; near-ties are counted."""
    near_ties = 0
    kinds = Kinds()
    with hybrid.watch.meddling(kinds):
        for prompt in prompts(hybrid, 1, 1):
            plain = hybrid.run(prompt, greedy(41), 0).token_ids
            for gamma in range(1, 9):
                done = hybrid.run(prompt, greedy(41), gamma)
                near_ties += hybrid.same_text(Job(prompt, greedy(41)), done.token_ids, plain)
                assert gamma == 1 or done.summary.speculation.mean_acceptance_length > 1.5
    assert kinds.count("copy") > 50
    assert kinds.count("model") > 20
    assert near_ties <= 1


def test_rows_that_copy_and_rows_that_draft_share_a_step(hybrid):
    """Three at once, all gammas: the plain text, and both kinds of drafts are accepted."""
    jobs = [Job(p, greedy(41), gamma) for gamma in (8, 5, 2, 0, 1, 3, 4, 6, 7) for p in prompts(hybrid, 2, 2)]
    plain = {tuple(job.prompt): hybrid.run(job.prompt, greedy(41), 0).token_ids for job in jobs}
    kinds, near_ties = Kinds(), 0
    with hybrid.watch.meddling(kinds):
        for job, done in zip(jobs, hybrid.run_all(jobs), strict=True):
            near_ties += hybrid.same_text(job, done.token_ids, plain[tuple(job.prompt)])
    assert kinds.count("copy", "model") > 10
    assert near_ties <= 2
    hybrid.assert_idle()


def test_a_seeded_row_is_the_same_alone_and_beside_the_other_kind(hybrid):
    """A15 at T = 0.7: whether a neighbour copies or drafts changes nothing."""
    jobs = [
        Job(prompt, SamplingParams(max_tokens=31, temperature=0.7, seed=11 * index, ignore_eos=True), gamma)
        for index, (prompt, gamma) in enumerate(zip(prompts(hybrid, 3, 3), (8, 2, 4, 4, 8, 2), strict=True))
    ]
    alone = [hybrid.run(*job).token_ids for job in jobs]
    kinds = Kinds()
    with hybrid.watch.meddling(kinds):
        assert [done.token_ids for done in hybrid.run_all(jobs[::2] + jobs[1::2])] == alone[::2] + alone[1::2]
        assert [done.token_ids for done in hybrid.run_all(jobs[::-1])] == alone[::-1]
    assert kinds.count("copy", "model") > 3


def test_copies_and_drafts_follow_the_targets_law(hybrid):
    """A03, A10: every offset of rounds of four, some copied, some drawn; ranked by how the draft's law differs."""
    options = {"max_tokens": 41, "temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
    made = prompts(hybrid, 4, 4)
    jobs = [Job(made[seed % 8], SamplingParams(seed=seed, **options), 4) for seed in range(64)]
    kinds = Kinds()
    with hybrid.watch.meddling(kinds):
        ranks = Ranks(hybrid, jobs, hybrid.chunks(jobs))
    assert kinds.count("copy", "model") > 20
    for offset, at_least in ((0, 300), (1, 200), (2, 100)):
        ranks.assert_uniform(offset, at_least)
    assert abs(ranks.z) < 5


def test_a_row_that_stops_or_is_cancelled_leaves_its_slot_clean(hybrid):
    """A stop token inside a copy ends the row there; a cancelled row's slot serves the next one at once."""
    copying, fresh = prompts(hybrid, 1, 1)
    text = hybrid.run(copying, greedy(30), 0).token_ids
    stop = text[2]
    done = hybrid.run(copying, greedy(30, stop_token_ids=(stop,)), 8)
    assert (done.token_ids, done.finish_reason) == (text[: text.index(stop) + 1], "stop")
    expected = [hybrid.run(fresh, greedy(37), 4).token_ids, hybrid.run(copying, greedy(37), 8).token_ids]
    for _ in range(3):
        streams = [hybrid.start(Job(copying, greedy(90), 8)) for _ in range(SLOTS)]
        for stream in streams:
            next(stream)
            stream.close()  # pyright: ignore
        jobs = [Job(fresh, greedy(37), 4), Job(copying, greedy(37), 8)]
        assert [done.token_ids for done in hybrid.run_all(jobs)] == expected
    hybrid.assert_idle()


def test_hybrid_needs_exactly_one_model(checkpoints):
    config = SpeculationConfig(method="hybrid")
    with pytest.raises(UserError, match="method hybrid: needs a draft checkpoint or a folder of heads, got none"):
        Engine.load(checkpoints("tiny-llama3"), speculation=config, max_len=240)
    both = dataclasses.replace(config, heads="h", model="d")
    with pytest.raises(UserError, match="method hybrid: expected a draft checkpoint or heads, got both"):
        Engine.load(checkpoints("tiny-llama3"), speculation=both, max_len=240)


def test_copies_and_drawn_trees_follow_the_targets_law(checkpoints, heads_folders, references):
    """A copied draft has a law of its own, the nodes of a tree share one per level; both in one batch, under block."""
    config = SpeculationConfig(method="hybrid", prompt_lookup_min=3, prompt_lookup_max=4)
    options = {"mesh": "1", "max_slots": SLOTS, "max_len": 240, "max_queue": 4096}
    with Engine.load(checkpoints("loop"), heads=heads_folders("medusa"), speculation=config, **options) as engine:
        rig = Rig(engine, Watch(engine), references["loop"])
        made = prompts(rig, 3, 3)
        sampling = {"max_tokens": 37, "temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
        jobs = [Job(made[seed % 6], SamplingParams(seed=seed, **sampling), 4) for seed in range(42)]
        kinds = Kinds()
        with rig.watch.meddling(kinds):
            streams = rig.chunks(jobs)
        assert kinds.count("copy", "model") > 20
        ranks = Ranks(rig, jobs, streams)
        ranks.by_offset["all"] = [rank for ranked in ranks.by_offset.values() for rank in ranked]
        ranks.assert_uniform("all", 1500)
        assert abs(ranks.z) < 5
