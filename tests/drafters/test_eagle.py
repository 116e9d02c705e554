"""EAGLE-1, EAGLE-2 and EAGLE-3 on the running engine: the authors' traces, and exactness whatever a head says."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.drafters.parity import follow, traces
from tests.engine.conftest import Golden, Job, greedy
from tests.engine.laws import Ranks

# EAGLE's top_k 4, depth 3, total_tokens 12: after the first expansion come three more, so nodes reach depth 4.
AUTHORS = {"tree_topk": 4, "tree_depth": 4, "tree_nodes": 12}
CHAIN = {"tree_topk": 1}
# Which heads, how they draft, and by which law the server accepts.
RIGS = {
    "eagle1-tree": ("eagle1", AUTHORS),
    "eagle3-tree": ("eagle3", AUTHORS),
    "eagle1-chain": ("eagle1", {**CHAIN, "rejection_sample_method": "block"}),
    "eagle3-chain": ("eagle3", {**CHAIN, "rejection_sample_method": "token"}),
}
NAMES = ("p7", "p33", "p150")
CLOSE = 2e-4  # keys, values and outputs of float32 passes of different widths


@pytest.fixture(scope="module")
def rigs(heads_rig):
    return lambda name: heads_rig(RIGS[name][0], **RIGS[name][1])


@pytest.fixture(scope="module")
def texts(shared) -> dict[str, dict[str, Golden]]:
    """By head, then by prompt: the targets' greedy texts."""
    found = {}
    for head, target in (("eagle1", "tiny-llama3"), ("eagle3", "tiny-llama3-8l")):
        data = np.load(shared / "fixtures" / target / "goldens.npz")
        found[head] = {
            name: Golden(data[f"{name}__input_ids"].tolist(), data[f"{name}__greedy_ids"].tolist()) for name in NAMES
        }
    return found


@pytest.mark.parametrize("prompt", NAMES)
@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_every_round_is_the_authors_round(rigs, shared, head, prompt):
    """EAGLE-2's trees, node by node with their parents, what was accepted, and the text."""
    trace = traces(shared / "fixtures" / head)[prompt]
    rounds = follow(rigs(f"{head}-tree"), trace)
    assert rounds == trace.steps
    assert sum(step.accepted for step in rounds) > len(rounds)


@pytest.mark.parametrize("name", RIGS)
def test_alone_every_gamma_gives_the_reference_text(rigs, texts, name):
    rig = rigs(name)
    tree = rig.engine.programs.shapes.gammas[-1] == 4
    full = 0
    # The longest bucket of a chain is compiled for one head alone: what differs between heads does not depend on it.
    for gamma in (0, 1, 2, 3, 4) if name == "eagle1-chain" else (0, 1, 2, 3, 4, 8):
        for golden in texts[RIGS[name][0]].values():
            with rig.watch.recording() as steps:
                done = rig.run(golden.ids, greedy(64), gamma)
            assert list(done.token_ids) == golden.greedy, gamma
            rows = [row for rows in steps for row in rows]
            assert max(row.accepted for row in rows) <= min(gamma, 4 if tree else 8)
            assert gamma == 0 or sum(row.accepted for row in rows) > 10
            assert tree or all(row.drafted <= gamma for row in rows)
            full += sum(row.accepted == gamma for row in rows) if gamma else 0
    assert full > 20  # rounds in which every level was accepted


@pytest.mark.parametrize("name", RIGS)
def test_together_mixed_lengths_and_gammas_give_the_reference_text(rigs, texts, name):
    rig = rigs(name)
    goldens = list(texts[RIGS[name][0]].values()) * 4
    gammas = (4, 0, 1, 3, 2 if name == "eagle1-chain" else 8)
    jobs = [Job(golden.ids, greedy(64), gammas[i % 5]) for i, golden in enumerate(goldens)]
    for golden, job, done in zip(goldens, jobs, rig.run_all(jobs), strict=True):
        assert list(done.token_ids) == golden.greedy, job.gamma
    rig.assert_idle()


def test_a_tree_is_drafted_only_where_every_node_has_a_slot(heads_rig, texts):
    """A tree with fewer drafts than levels, up to the very end of the context: a node without a slot would not even see
    itself, and what follows it when it is accepted would be another model's text."""
    drafts, end = 3, 48
    rig = heads_rig("eagle1", {"max_slots": 1, "max_len": end}, tree_topk=3, tree_depth=5, tree_nodes=1 + drafts)
    golden = texts["eagle1"]["p7"]
    with rig.watch.recording() as steps:
        for start in range(4):
            done = rig.run([*golden.ids, *golden.greedy[:start]], greedy(None), 5)
            assert list(done.token_ids) == golden.greedy[start : end - len(golden.ids)]
            assert done.finish_reason == "length"
    rows = [(row.length - len(row.tokens), row.drafted) for rows in steps for row in rows]
    assert all(not drafted or before + drafts <= end for before, drafted in rows), rows
    assert max(before for before, drafted in rows if drafted) >= end - drafts - 2, "trees end long before the context"
    assert any(before > end - drafts for before, _ in rows)


@pytest.mark.parametrize("name", ["eagle3-tree", "eagle3-chain"])
def test_a_head_that_is_always_wrong_costs_passes_alone(rigs, texts, name):
    """Zero acceptance in every round: what it drafted is overwritten, in its own cache and in the target's."""
    rig = rigs(name)
    right = rig.engine.programs.params
    wrong = {leaf: -x if leaf == "lm_head" else x for leaf, x in right.drafter.items()}
    rig.engine.programs.params = right._replace(drafter=wrong)
    try:
        for golden in texts["eagle3"].values():
            done = rig.run(golden.ids, greedy(64), 4)
            assert list(done.token_ids) == golden.greedy
            assert done.summary.speculation.num_accepted_draft_tokens == 0
            assert done.summary.speculation.num_spec_steps > 50
        jobs = [Job(golden.ids, greedy(40), 4) for golden in texts["eagle3"].values()]
        got = [list(done.token_ids) for done in rig.run_all(jobs)]
        assert got == [golden.greedy[:40] for golden in texts["eagle3"].values()]
    finally:
        rig.engine.programs.params = right


def test_a_head_without_numbers_still_changes_nothing(rigs, texts):
    """Weights that are NaN: drafts are then drawn from a law of no use, and judged like any other."""
    for name in ("eagle3-tree", "eagle3-chain"):
        rig = rigs(name)
        right = rig.engine.programs.params
        broken = {leaf: x * float("nan") if leaf == "fc" else x for leaf, x in right.drafter.items()}
        golden = texts["eagle3"]["p7"]
        sampling = SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True)
        rig.engine.programs.params = right._replace(drafter=broken)
        try:
            assert list(rig.run(golden.ids, greedy(40), 4).token_ids) == golden.greedy[:40]
            assert len(rig.run(golden.ids, sampling, 4).token_ids) == 30
        finally:
            rig.engine.programs.params = right
        assert list(rig.run(golden.ids, greedy(40), 4).token_ids) == golden.greedy[:40]


@pytest.mark.parametrize("name", RIGS)
def test_after_any_rounds_the_cache_is_that_of_a_fresh_prefill(rigs, texts, name):
    """Committed rows are made of the target's features, never of the drafts that stood in their slots before."""
    rig = rigs(name)
    golden = texts[RIGS[name][0]]["p33"]

    def held() -> tuple[list[tuple[int, list[np.ndarray]]], object]:
        found: list[tuple[int, list[np.ndarray]]] = []

        def note(batch, running) -> None:
            state = batch._state
            (n,) = np.asarray(state.length_B)
            (length,) = np.asarray(state.drafter.length_B)
            assert length == n - 1
            cache = [np.asarray(array)[0, :, :length] for array in jax.tree.leaves(state.drafter.cache)]
            found.append((int(n), [*cache, np.asarray(state.drafter.hidden_BD)[0]]))

        return found, note

    seen, note = held()
    with rig.watch.meddling(note):
        rig.run(golden.ids, greedy(50), 4)
        rig.run(golden.ids, greedy(50), 0)  # and after plain steps
    for n, arrays in seen[1:-1:7]:
        fresh, note = held()
        with rig.watch.meddling(note):
            rig.run([*golden.ids, *golden.greedy][: n - 1], greedy(2), 0)
        (length, expected), *_ = fresh
        assert length == n
        for got, wanted in zip(arrays, expected, strict=True):
            assert np.abs(got - wanted).max() < CLOSE


def sampled(goldens: dict[str, Golden]) -> list[Job]:
    names = (*NAMES, *NAMES)
    return [
        Job(goldens[name].ids, SamplingParams(max_tokens=29, temperature=0.7, seed=i, ignore_eos=True), gamma)
        for i, (name, gamma) in enumerate(zip(names, (4, 2, 1, 3, 8, 0), strict=True))
    ]


@pytest.mark.parametrize("name", RIGS)
def test_a_seeded_request_is_the_same_alone_and_in_company(rigs, texts, name):
    rig = rigs(name)
    jobs = sampled(texts[RIGS[name][0]])
    jobs[2] = jobs[2]._replace(sampling=dataclasses.replace(jobs[2].sampling, temperature=0.0))
    alone = [rig.run(*job).token_ids for job in jobs]
    assert [done.token_ids for done in rig.run_all(jobs)] == alone
    assert [done.token_ids for done in rig.run_all(jobs[::-1])] == alone[::-1]
    assert len(set(alone)) == 6


@pytest.mark.parametrize("name", ["eagle1-chain", "eagle3-chain", "eagle3-tree"])
def test_sampled_text_follows_the_target(rigs, texts, name):
    """Drawn chains by token and block, an undrawn tree by token; the false-alarm rate is that of test_law.py.

    The heads know the greedy texts alone, so each job leaves such a text at another place, and is short.
    """
    rig = rigs(name)
    jobs = []
    for golden in texts[RIGS[name][0]].values():
        for n in range(0, 56, 2):
            for options in ({"temperature": 0.4}, {"temperature": 1.0, "top_k": 2}):
                sampling = SamplingParams(max_tokens=6, seed=n, ignore_eos=True, **options)  # pyright: ignore
                jobs.append(Job([*golden.ids, *golden.greedy[:n]], sampling, 4))
    ranks = Ranks(rig, jobs, rig.chunks(jobs))
    for offset, at_least in ((0, 300), (1, 60), (2, 30)):
        ranks.assert_uniform(offset, at_least)
    assert abs(ranks.z) < 5


def test_stop_ids_are_not_drafted_while_they_are_banned(rigs, texts):
    """min_tokens, in both vocabularies of a head: its own and the target's."""
    for name in ("eagle1-tree", "eagle3-tree", "eagle3-chain"):
        rig, golden = rigs(name), texts[RIGS[name][0]]["p33"]
        stops = tuple(sorted(set(golden.greedy[9:21])))
        sampling = greedy(40, stop_token_ids=stops, min_tokens=17)
        plain = rig.run(golden.ids, sampling, 0)
        assert not set(plain.token_ids[:16]) & set(stops)
        assert rig.run(golden.ids, sampling, 4).token_ids == plain.token_ids


def test_the_end_of_the_context(rigs):
    """A tree has scratch slots of its own in the head's cache; the target's has no room for it at the very end."""
    prompt = np.random.default_rng(5).integers(0, 490, size=260).tolist()
    for name in ("eagle1-tree", "eagle1-chain"):
        rig = rigs(name)
        plain = rig.run(prompt, greedy(None), 0)
        done = rig.run(prompt, greedy(None), 4)
        assert (done.finish_reason, len(done.token_ids)) == ("length", 40)
        assert rig.same_text(Job(prompt, greedy(None)), done.token_ids, plain.token_ids) == 0
        assert done.summary.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["eagle1-tree", "eagle3-chain"])
def test_a_cancelled_rows_slot_is_used_again_at_once(rigs, texts, name):
    rig, goldens = rigs(name), texts[RIGS[name][0]]
    long = rig.start(Job(goldens["p150"].ids, greedy(64), 4))
    for taken in range(4):
        doomed = [rig.start(Job(goldens["p33"].ids, greedy(60), 4)) for _ in range(2)]
        for stream in doomed:
            for _ in range(taken):
                next(stream)
            stream.close()  # pyright: ignore
        assert list(rig.run(goldens["p7"].ids, greedy(20), 4).token_ids) == goldens["p7"].greedy[:20]
    assert [token for chunk in long for token in chunk.token_ids] == goldens["p150"].greedy
    rig.assert_idle()


def test_windows_grow_under_a_head(heads_rig, texts):
    """From 128 to 512 slots in mid-text: the head's cache is copied with the rest."""
    rig = heads_rig("eagle1", {"max_slots": 1, "max_len": 512}, **AUTHORS)
    golden = texts["eagle1"]["p33"]
    windows = []
    with rig.watch.meddling(lambda batch, running: windows.append(batch.window)):
        done = rig.run(golden.ids, greedy(130), 4)
    assert set(windows) == {128, 512}
    assert list(done.token_ids[:64]) == golden.greedy
    plain = rig.run(golden.ids, greedy(130), 0)
    assert rig.same_text(Job(golden.ids, greedy(130)), done.token_ids, plain.token_ids) == 0


def test_a_mesh_of_four_drafts_and_says_the_same(heads_rig, texts):
    rig = heads_rig("eagle3", {"mesh": "4", "max_slots": 2}, **AUTHORS)
    for golden in texts["eagle3"].values():
        assert list(rig.run(golden.ids, greedy(64)).token_ids) == golden.greedy
    jobs = [
        Job(golden.ids, greedy(64), gamma) for golden, gamma in zip(texts["eagle3"].values(), (3, 0, 4), strict=True)
    ]
    for golden, done in zip(texts["eagle3"].values(), rig.run_all(jobs), strict=True):
        assert list(done.token_ids) == golden.greedy
    assert rig.engine.loads().counters.num_accepted_tokens > 100
