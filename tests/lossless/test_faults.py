"""What went wrong elsewhere with heads and lookups, once more for every drafter (ids of the field's faults)."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxspec import Completion, SamplingParams
from jaxspec.engine.batch import Prefill
from jaxspec.speculate.drafters.eagle import EagleState
from tests.engine.conftest import Job, greedy
from tests.lossless.cases import LEVELS, MAX_LEN, Case, SmallRig
from tests.lossless.exact import Exact
from tests.lossless.test_rounds import every_drafter
from tests.lossless.texts import Texts, greedy_jobs, sampled_jobs

CLOSE = 1e-4  # keys, values and hidden states of float32 passes of different widths


@every_drafter
def test_unseeded_and_seeded_rows_share_a_batch(case: Case, rig: SmallRig):
    """A16: every row is its solo run, by the seed that it reports."""
    jobs = [
        Job(job.prompt, dataclasses.replace(job.sampling, temperature=0.3, seed=None if i % 3 else i), job.gamma)
        for i, job in enumerate(greedy_jobs()[:7])
    ]
    for job, done in zip(jobs, rig.run_all(jobs), strict=True):
        assert job.sampling.seed in (None, done.summary.seed)
        again = dataclasses.replace(job.sampling, seed=done.summary.seed)
        assert rig.run(job.prompt, again, job.gamma).token_ids == done.token_ids


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@every_drafter
def test_concurrency_leaves_tokens_and_their_probability_alone(case: Case, rig: SmallRig, temperature: float):
    """A29: 2, 4 and 8 at once; the text is as probable under the target as text of the target is."""
    jobs = [
        job._replace(sampling=dataclasses.replace(job.sampling, temperature=temperature)) for job in sampled_jobs("t1")
    ][:8]
    streams = {
        size: [chunks for start in range(0, 8, size) for chunks in rig.chunks(jobs[start : start + size])]
        for size in (2, 4, 8)
    }
    texts = [
        [[token for chunk in chunks for token in chunk.token_ids] for chunks in found] for found in streams.values()
    ]
    assert texts[0] == texts[1] == texts[2]
    assert abs(Exact(rig, jobs, streams[8]).z) < 5


@every_drafter
def test_a_canary_sings_the_same_after_any_traffic(case: Case, rig: SmallRig):
    """A30, B16: long, sampled, filtered, stopped and aborted requests, then the canary in every slot, by the same
    rounds: a drafter that kept anything of them would be right less often."""
    canary = greedy_jobs()[6]
    first = rig.run(*canary)
    traffic = [*sampled_jobs("t1")[:8], *greedy_jobs()[:4]]
    traffic += [
        Job(job.prompt, SamplingParams(seed=i, ignore_eos=True, **options), 2)  # pyright: ignore
        for i, (job, options) in enumerate(
            zip(
                traffic,
                ({"top_k": 2, "min_tokens": 9}, {"temperature": 3.0}, {"stop_token_ids": (1, 2, 3), "logprobs": 3}),
                strict=False,
            )
        )
    ]
    streams = [rig.start(job) for job in traffic]
    for index, stream in enumerate(streams):
        if index % 3 == 0:
            next(stream)
            stream.close()  # pyright: ignore
    for index, stream in enumerate(streams):
        if index % 3:
            list(stream)
    for done in [rig.run(*canary), *rig.run_all([canary] * 16)]:
        assert done.token_ids == first.token_ids
        assert done.summary.speculation == first.summary.speculation


@every_drafter
def test_prompts_that_nearly_fill_the_context(case: Case, rig: SmallRig, plain: Texts):
    """B06, B07: the text goes to the very end, for "length"; a request beside it is not disturbed."""
    neighbour, expected = greedy_jobs()[0], plain.greedy[0]
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 16, size=MAX_LEN - left).tolist() for left in (1, 2, 3, 4, 5, 6, 9)]
    beside = rig.start(neighbour)
    for prompt, done in zip(prompts, rig.run_all([Job(p, greedy(None), LEVELS) for p in prompts]), strict=True):
        assert (len(prompt) + len(done.token_ids), done.finish_reason) == (MAX_LEN, "length")
        alone = rig.run(prompt, greedy(None), 0).token_ids
        assert rig.same_text(Job(prompt, greedy(None)), done.token_ids, alone) == 0
    assert rig.same_text(neighbour, Completion.of(beside).token_ids, expected) == 0


@every_drafter
def test_an_abort_between_prefill_chunks_leaves_nothing(case: Case, rig: SmallRig, monkeypatch):
    """B20: the same prompt again is a cold run: the same text by the same rounds."""
    prompt = np.random.default_rng(4).integers(0, 16, size=41).tolist()
    cold = rig.run(prompt, greedy(None), LEVELS)
    seen = []

    class AbortedPrefill(Prefill):
        def advance(self, largest_chunk):
            seen.append(self._done)
            if len(seen) == 2:
                rig.engine.abort("chunked")
            return super().advance(largest_chunk)

    with monkeypatch.context() as patch:
        patch.setattr("jaxspec.engine.loop.Prefill", AbortedPrefill)
        done = Completion.of(rig.start(Job(prompt, greedy(None)), request_id="chunked"))
    assert (done.finish_reason, done.token_ids, seen) == ("abort", (), [0, 16])
    again = rig.run(prompt, greedy(None), LEVELS)
    assert (again.token_ids, again.summary.speculation) == (cold.token_ids, cold.summary.speculation)


def held(state, row: int) -> Iterator[np.ndarray]:
    """Everything that a row's caches hold for good: valid slots, and the hidden state that drafting starts from."""
    model = getattr(state.drafter, "model", state.drafter)
    caches = [(state.target.layers, state.target.length_B)]
    if hasattr(model, "layers"):
        caches.append((model.layers, model.length_B))
    if isinstance(model, EagleState):
        caches.append((model.cache, model.length_B))
    for arrays, length_B in caches:
        length = int(np.asarray(length_B)[row])
        for array in jax.tree.leaves(arrays):
            yield np.asarray(array)[row, :, :length]
    if hasattr(model, "hidden_BD"):
        yield np.asarray(model.hidden_BD)[row]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 33])
@every_drafter
def test_after_any_rounds_the_caches_are_those_of_a_fresh_prefill(case: Case, rig: SmallRig, size: int):
    """B02, B23, B24, B28: prompts at the edges of chunks; what drafts left in the slots is overwritten, and a head's
    rows for accepted tokens are made of the target's features, not of its own."""
    prompt = np.random.default_rng(size).integers(0, 16, size=size).tolist()
    moments: list[tuple[int, list[np.ndarray]]] = []

    def note(batch, running) -> None:
        ((slot, request),) = running.items()
        moments.append((request.length, list(held(batch._state, rig.watch.row(slot)))))

    with rig.watch.meddling(note):
        text = [*prompt, *rig.run(prompt, greedy(24), LEVELS).token_ids]
    assert text[size] == int(rig.reference.logits([prompt])[0, -1].argmax())
    decoded = moments.copy()
    for n, arrays in decoded[1::4]:
        moments.clear()
        with rig.watch.meddling(note):
            rig.run(text[: n - 1], greedy(4), LEVELS)  # enough that a draft model is wanted
        (length, fresh), *_ = moments
        assert length == n
        for got, expected in zip(arrays, fresh, strict=True):
            slots = min(got.shape[-2], expected.shape[-2]) if got.ndim == 3 else None
            # A draft model may lag by its own last draft, and in a hybrid by all that was copied.
            assert slots is None or slots >= n - 2 or case.drafter == "hybrid-draft_model"
            got, expected = (x if slots is None else x[:, :slots] for x in (got, expected))
            assert np.abs(got - expected).max(initial=0) < CLOSE
