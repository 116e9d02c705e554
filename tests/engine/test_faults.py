"""A broken row is mended once from its tokens, alone; a second break ends it with a sentence, and nothing else."""

import jax
import numpy as np
import pytest

from jaxspec import Completion, SamplingParams
from jaxspec.errors import EngineFault
from jaxspec.speculate.state import DESYNC, FAULTS, NOT_FINITE
from tests.engine.conftest import Job, Rig, greedy


def poison(state, row: int):
    """NaN in the row's first key."""

    def at(index, array):
        host = np.array(array)
        if index == 0:
            host[row, :, 0] = np.nan
        return jax.device_put(host, array.sharding)

    layers, structure = jax.tree.flatten(state.target.layers)
    layers = jax.tree.unflatten(structure, [at(index, array) for index, array in enumerate(layers)])
    return state._replace(target=state.target._replace(layers=layers))


def shift(state, row: int):
    """A target cache that claims one slot too few."""
    host = np.array(state.target.length_B)
    host[row] -= 1
    return state._replace(target=state.target._replace(length_B=jax.device_put(host, state.target.length_B.sharding)))


class Saboteur:
    """Breaks the row of one request whenever its committed length reaches one of ``at``."""

    def __init__(self, rig: Rig, request_id: str, harm, at: list[int]) -> None:
        self.rig, self.request_id, self.harm, self.at = rig, request_id, harm, list(at)

    def __call__(self, batch, running) -> None:
        for slot, request in running.items():
            if self.at and request.request_id == self.request_id and request.completion_length >= self.at[0]:
                self.at.pop(0)
                batch._state = self.harm(batch._state, self.rig.watch.row(slot))


HARMS = {"not finite": (poison, NOT_FINITE), "desync": (shift, DESYNC)}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("drafter", ["ngram", "near_draft"])
def test_a_fault_restarts_one_row_once(drafter, harm, goldens, request):
    """Its text is the undisturbed one; sampled neighbours, under every filter, feel nothing; alone it works too."""
    rig: Rig = request.getfixturevalue(drafter)
    do_harm, code = HARMS[harm]
    victim = Job(goldens["p33"].ids, greedy(64), 4)
    options = ({"top_p": 0.8}, {"top_k": 100}, {"min_p": 0.1}, {"temperature": 0.0})
    others = [
        Job(goldens["p7"].ids, SamplingParams(max_tokens=60, seed=i, ignore_eos=True, **chosen), 4)
        for i, chosen in enumerate(options)
    ]
    undisturbed = [done.token_ids for done in rig.run_all(others)]
    for neighbours in (others, []):
        with rig.watch.recording() as steps, rig.watch.meddling(Saboteur(rig, "victim", do_harm, [9])):
            beside = [rig.start(job) for job in neighbours]
            done = Completion.of(rig.start(victim, request_id="victim"))
            assert [Completion.of(stream).token_ids for stream in beside] == undisturbed[: len(beside)]
        assert list(done.token_ids) == goldens["p33"].greedy
        assert [row.fault for rows in steps for row in rows if row.fault] == [code]
        assert done.summary.usage.prompt_tokens == 33


@pytest.mark.parametrize("harm", HARMS)
def test_a_second_fault_ends_the_request_with_its_sentence(harm, ngram, goldens):
    """The engine lives on, and the next request in that slot is sound."""
    do_harm, code = HARMS[harm]
    with ngram.watch.meddling(Saboteur(ngram, "victim", do_harm, [5, 20])):
        neighbour = ngram.start(Job(goldens["p7"].ids, greedy(64)))
        stream = ngram.start(Job(goldens["p33"].ids, greedy(64)), request_id="victim")
        seen: list[int] = []
        with pytest.raises(EngineFault, match=f"request victim: {FAULTS[code]}"):
            seen.extend(token for chunk in stream for token in chunk.token_ids)
        assert seen == goldens["p33"].greedy[: len(seen)]
        assert len(seen) >= 20
        assert list(Completion.of(neighbour).token_ids) == goldens["p7"].greedy
    assert ngram.engine.ready
    assert list(ngram.run(goldens["p33"].ids, greedy(64)).token_ids) == goldens["p33"].greedy
    assert ngram.engine.loads().counters.num_requests_finished["fault"] >= 1
    ngram.assert_idle()


def test_a_row_at_rest_that_holds_garbage_harms_nobody(ngram, goldens):
    """A cancelled row keeps its slots until they are taken: NaN in them stays there."""
    jobs = [Job(goldens[name].ids, greedy(64), 4) for name in ("p7", "p33", "p1")]

    def spoil(batch, running) -> None:
        if batch._lone is None and 1 not in running:
            batch._state = poison(batch._state, 1)

    with ngram.watch.meddling(spoil):
        streams = [ngram.start(job) for job in jobs]
        for stream in streams:
            next(stream)
        streams[1].close()  # pyright: ignore
        first = [next(streams[0]), next(streams[2])]
        assert all(chunk.finish_reason is None for chunk in first)
        texts = [[t for chunk in streams[i] for t in chunk.token_ids] for i in (0, 2)]
    assert texts[0] == goldens["p7"].greedy[-len(texts[0]) :]
    assert texts[1] == goldens["p1"].greedy[-len(texts[1]) :]


def test_a_crash_of_the_loop_ends_everyone_and_health_with_it(make_rig, goldens):
    """H19: after a fault that no row accounts for, nothing hangs and nothing is accepted."""
    rig = make_rig(method="none", warm=False, max_slots=2, max_len=61)
    rig.engine._warm = True

    def crash(batch, running) -> None:
        raise RuntimeError("the device fell off")

    with rig.watch.meddling(crash):
        streams = [rig.start(Job(goldens["p7"].ids, greedy(9))) for _ in range(3)]
        for stream in streams:
            with pytest.raises(EngineFault, match="the device fell off"):
                list(stream)
    assert not rig.engine.ready
    with pytest.raises(EngineFault, match="the device fell off"):
        rig.run(goldens["p7"].ids, greedy(9))
