"""EAGLE-1, EAGLE-2 and EAGLE-3 on the running engine: the authors' traces, and the target's text at their vocabulary.

Rounds of every kind, in company, cancelled, cut, always wrong and at the end of the context: tests/lossless. On four
devices: test_heads_vocab.py.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.drafters.parity import follow, traces
from tests.engine.conftest import Golden, Job, Rig, greedy
from tests.engine.laws import Ranks
from tests.engine.reference import NEAR_TIE

# EAGLE's top_k 4, depth 3, total_tokens 12: after the first expansion come three more, so nodes reach depth 4.
AUTHORS = {"tree_topk": 4, "tree_depth": 4, "tree_nodes": 12}
CHAIN = {"tree_topk": 1}
# Which heads, how they draft, and by which law the server accepts.
RIGS = {
    "eagle1-tree": ("eagle1", AUTHORS),
    "eagle3-tree": ("eagle3", AUTHORS),
    "eagle1-chain": ("eagle1", {**CHAIN, "num_speculative_tokens": 4, "rejection_sample_method": "block"}),
    "eagle3-chain": ("eagle3", {**CHAIN, "rejection_sample_method": "token"}),
}
NAMES = ("p7", "p33", "p150")


@pytest.fixture(scope="module")
def rigs(heads_rig):
    # One chain has all of its buckets: what differs between heads does not depend on them.
    return lambda name: heads_rig(RIGS[name][0], gammas=name == "eagle3-chain", **RIGS[name][1])


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
    tree, deepest = RIGS[name][1] is AUTHORS, rig.engine.programs.shapes.gammas[-1]
    full = 0
    for gamma in sorted({0, 1, 2, 3, 4, deepest}):
        for prompt in NAMES if gamma == deepest else ("p33",):
            golden = texts[RIGS[name][0]][prompt]
            with rig.watch.recording() as steps:
                done = rig.run(golden.ids, greedy(64), gamma)
            assert list(done.token_ids) == golden.greedy, gamma
            rows = [row for rows in steps for row in rows]
            assert max(row.accepted for row in rows) <= min(gamma, deepest)
            assert gamma == 0 or sum(row.accepted for row in rows) > 10
            assert tree or all(row.drafted <= gamma for row in rows)
            full += sum(row.accepted == gamma for row in rows) if gamma else 0
    assert full > 20  # rounds in which every level was accepted


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


@pytest.mark.parametrize("name", ["eagle1-chain", "eagle3-chain", "eagle3-tree"])
def test_sampled_text_follows_the_target(rigs, texts, name):
    """Drawn chains by token and block, an undrawn tree by block; the false-alarm rate is that of test_law.py.

    The heads know the greedy texts alone, so each job leaves such a text at another place, and is short.
    """
    rig = rigs(name)
    jobs = []
    for golden in (texts[RIGS[name][0]][prompt] for prompt in ("p7", "p33")):
        for n in range(60):
            for options in ({"temperature": 0.4}, {"temperature": 1.0, "top_k": 2}):
                sampling = SamplingParams(max_tokens=6, seed=n, ignore_eos=True, **options)  # pyright: ignore
                jobs.append(Job([*golden.ids, *golden.greedy[:n]], sampling, 4))
    ranks = Ranks(rig, jobs, rig.chunks(jobs))
    if RIGS[name][1].get("rejection_sample_method") == "token":
        for offset, at_least in ((0, 300), (1, 60), (2, 30)):
            ranks.assert_uniform(offset, at_least)
    ranks.assert_uniform("all", 600)
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


def test_windows_grow_under_a_head(heads_rig, texts):
    """From 128 to 512 slots in mid-text: the head's cache is copied with the rest."""
    rig = heads_rig("eagle1", {"max_slots": 1, "max_len": 512}, **AUTHORS)
    golden = texts["eagle1"]["p33"]
    windows = []
    with rig.watch.meddling(lambda batch, running: windows.append(batch.window)):
        done = rig.run(golden.ids, greedy(130), 4)
    assert set(windows) == {128, 512}
    assert list(done.token_ids[:64]) == golden.greedy
    assert_likeliest(rig, golden.ids, done.token_ids)


def assert_likeliest(rig: Rig, prompt: Sequence[int], text: Sequence[int]) -> None:
    """Every token is the target's first choice after those before it, or nearly."""
    logits_TV = rig.reference.logits([[*prompt, *text]])[0][len(prompt) - 1 : -1]
    behind = logits_TV.max(axis=1) - logits_TV[np.arange(len(text)), text]
    assert (behind < NEAR_TIE).all()
    assert np.count_nonzero(behind) <= 1
