"""Lookup first, the model where nothing matches: the plain text, whichever drafts, alone and beside the other kind.

Seeded alone and in company, stopped and cancelled, and beside trees: tests/lossless.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Engine, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.engine.batch import Batch
from jaxspec.engine.request import Request
from jaxspec.errors import UserError
from jaxspec.model.cache import KVCache
from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.programs import Programs
from jaxspec.speculate.state import DecodeState
from tests.engine.conftest import Job, Rig, greedy, widest
from tests.engine.laws import Ranks
from tests.engine.watch import Watch

SLOTS = 3


class Kinds:
    """Who drafts for each row, step by step: "copy", "model" or "none". Checks what the report says of the draft.

    ``filled``: also that the cache of a row that the model drafts for has no hole: what is in it is what the draft
    model computes from the committed tokens, afresh.
    """

    def __init__(self, filled: Programs | None = None) -> None:
        self.steps: list[dict[str, str]] = []
        self._programs = filled

    def __call__(self, batch: Batch, running: dict[int, Request]) -> None:
        state = batch._state
        assert state is not None
        found_B, ready = np.asarray(state.drafter.lookup.found_B), {}
        for slot, request in running.items():
            row = 0 if batch._lone is not None else slot
            if hasattr(state.drafter.model, "layers"):
                length = int(np.asarray(state.drafter.model.length_B)[row])
                assert request.lag == request.length - 1 - length >= 0
                if self._programs is not None and not found_B[row] and min(request.next_gamma(), request.ready) > 0:
                    assert_filled(state, row, length, self._programs)
            drafts = min(request.next_gamma(), request.ready) > 0
            ready[request.request_id] = ("copy" if found_B[row] else "model") if drafts else "none"
        self.steps.append(ready)

    def count(self, *kinds: str) -> int:
        """Steps in which all of these occurred."""
        return sum(set(kinds) <= set(step.values()) for step in self.steps)

    def turns(self, first: str, then: str) -> int:
        """How often a row of one kind was of another in its next step."""
        return sum(
            before.get(request_id) == first and kind == then
            for before, step in itertools.pairwise(self.steps)
            for request_id, kind in step.items()
        )


def assert_filled(state: DecodeState, row: int, length: int, programs: Programs) -> None:
    """The first ``length`` slots of a row of the draft's cache, against a prefill of the same tokens."""
    # A copy: the programs take what they are given.
    afresh, done, chunk = jax.tree.map(jnp.copy, state), 0, programs.shapes.chunks[-1]
    while done < length:
        afresh = programs.prefill_drafter(afresh, done, chunk)
        done += chunk
    for layer, expected in zip(state.drafter.model.layers, afresh.drafter.model.layers, strict=True):
        for slots_BKSH, expected_BKSH in zip(layer, expected, strict=True):
            np.testing.assert_allclose(slots_BKSH[row, :, :length], expected_BKSH[row, :, :length], atol=1e-4)


def forget(state: DecodeState, lag: int) -> KVCache:
    """The draft's cache without its last tokens: so that it lacks ``lag``, and nonsense in their slots."""
    cache = state.drafter.model
    length_B = jnp.maximum(state.length_B - 1 - lag, 0)
    is_kept_BKSH = (jnp.arange(cache.window)[None, :] < length_B[:, None])[:, None, :, None]
    forgotten = KVCache(jax.tree.map(lambda x_BKSH: jnp.where(is_kept_BKSH, x_BKSH, 7.0), cache.layers), length_B)
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), forgotten, cache)


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
        widest(engine)
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
            for gamma in (1, 2, 3, 5, 8):
                done = hybrid.run(prompt, greedy(41), gamma)
                near_ties += hybrid.same_text(Job(prompt, greedy(41)), done.token_ids, plain)
                assert gamma == 1 or done.summary.speculation.mean_acceptance_length > 1.5
    assert kinds.count("copy") > 30
    assert kinds.count("model") > 12
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


def test_a_model_that_drafts_again_after_copies_has_taken_them_in(hybrid):
    """Not one slot is left out. Short suffixes are found often and seldom right, so copies and the model take turns."""
    made, kinds = prompts(hybrid, 2, 0), Kinds(filled=hybrid.engine.programs)
    sampling = SamplingParams(max_tokens=41, temperature=1.0, ignore_eos=True)
    with hybrid.watch.meddling(kinds):
        for seed in range(6):
            size = 1 + seed % 2
            speculation = SpeculationParams(1 + seed % 4, prompt_lookup_max=size, prompt_lookup_min=size)
            list(hybrid.engine.generate(made[seed % 2], dataclasses.replace(sampling, seed=seed), speculation))
    assert kinds.turns("copy", "model") > 10


def test_a_model_takes_in_what_it_lacks_before_it_drafts(hybrid):
    """It forgets 0 to 11 tokens before a step: up to 9 its first pass takes them in, more are a prefill's."""
    kinds, lags = Kinds(filled=hybrid.engine.programs), itertools.cycle(range(GAMMA_MAX + 4))

    def forgetting(batch: Batch, running: dict[int, Request]) -> None:
        kinds(batch, running)
        state, lag = batch._state, next(lags)
        assert state is not None
        batch._state = state._replace(drafter=state.drafter._replace(model=forget(state, lag)))

    (prompt,) = prompts(hybrid, 0, 1)
    with hybrid.watch.meddling(forgetting):
        hybrid.run(prompt, SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True), 3)
    assert kinds.count("model") > 2 * GAMMA_MAX


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


def test_hybrid_needs_exactly_one_model(checkpoints):
    config = SpeculationConfig(method="hybrid")
    with pytest.raises(UserError, match="method hybrid: needs a draft checkpoint or a folder of heads, got none"):
        Engine.load(checkpoints("tiny-llama3"), speculation=config, max_len=240)
    both = dataclasses.replace(config, heads="h", model="d")
    with pytest.raises(UserError, match="method hybrid: expected a draft checkpoint or heads, got both"):
        Engine.load(checkpoints("tiny-llama3"), speculation=both, max_len=240)
