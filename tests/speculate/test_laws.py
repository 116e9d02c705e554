"""The token and block laws are lossless on every topology: by enumeration, not by sampling alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.speculate import sampling, verify
from jaxspec.speculate.sampling import RowSampling
from tests.speculate import enumeration, oracle
from tests.speculate.enumeration import SHAPES, Case

LAWS = {
    "token": jax.jit(verify.token_law, static_argnums=3),
    "block": jax.jit(verify.block_law, static_argnums=3),
}
FINAL_LAW = jax.jit(sampling.final_law)
PLAIN = {"token": oracle.plain_token_law, "block": oracle.plain_block_law}
PRECISIONS = [("float64", 1e-6), ("float32", 1e-5)]
VOCAB, DRAFTED, DEPTH = 4, 7, 3
WIDTH = 42_000  # rows of the largest batch below; all share one compiled shape per law and precision


def filtered(rng, vocab):
    """A law with the zeros that filters leave."""
    return oracle.sorted_law(rng.normal(size=vocab) * 2, 1.0, top_k=vocab // 2 + 1, top_p=0.9)


PAIRS = {
    "random": (enumeration.uneven, enumeration.uneven),
    "filtered": (filtered, filtered),
    "disjoint": (enumeration.on_ids((0, 2)), enumeration.on_ids((1, 3))),
    "overlapping": (enumeration.on_ids((0, 1, 2)), enumeration.on_ids((1, 2, 3))),
    "target one-hot": (enumeration.one_hot, enumeration.uneven),
    "draft one-hot": (enumeration.uneven, enumeration.one_hot),
    "both one-hot": (enumeration.one_hot, enumeration.one_hot),
}


def rounds(law, cases, *, dtype="float64", vocab=VOCAB, width=WIDTH):
    """``Committed`` of every case under a law, and what it was computed from."""
    with jax.enable_x64(dtype == "float64"):
        batch, owner = enumeration.plan(cases, vocab, DRAFTED, np.random.default_rng(5))
        verdict = enumeration.evaluate(
            LAWS[law], batch, drawn=cases[0].q is not None, dtype=dtype, depth=DEPTH, width=width
        )
    results = enumeration.committed(cases, batch, owner, verdict, vocab, whole_path=law == "token")
    return results, batch, owner, verdict


def assert_lossless(cases, results, tolerance):
    for case, result in zip(cases, results, strict=True):
        plain = oracle.plain_law(case.p[: case.shape.depth + 1])
        assert oracle.distance(result.joint(case.p), plain) < tolerance, case.shape


def cases_of(pair, seed, vocab=VOCAB):
    """Every shape with its own laws, in one batch."""
    rng = np.random.default_rng(seed)
    cases = []
    for shape in SHAPES.values():
        p, q = (enumeration.tables(rng, vocab, DEPTH + 1, law) for law in PAIRS[pair])
        cases.append(Case(shape, p, q, q))
    return cases


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("law", LAWS)
def test_committed_tokens_follow_the_target_on_every_topology(law, pair, dtype, tolerance):
    """Chains, trees and padding side by side: the joint law of as many tokens as the round can commit."""
    cases = cases_of(pair, 11)
    results, *_ = rounds(law, cases, dtype=dtype)
    assert_lossless(cases, results, tolerance)
    # A law that rejects everything would be lossless too: one draft must stand as often as it can.
    first = cases[0]
    assert results[0].accepted == pytest.approx(np.minimum(first.p[0], first.q[0]).sum(), abs=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("law", LAWS)
def test_undrawn_drafts_are_judged_by_p_alone(law, dtype, tolerance):
    """A10: a deterministic proposer has a one-hot q; on a tree siblings are its most likely ids. 100 laws a shape."""
    rng = np.random.default_rng(12)
    cases = []
    for kind in [enumeration.uneven] * 60 + [filtered] * 30 + [enumeration.one_hot] * 10:
        for shape in SHAPES.values():
            p = enumeration.tables(rng, VOCAB, DEPTH + 1, kind)
            cases.append(Case(shape, p, None, enumeration.tables(rng, VOCAB, DEPTH + 1, enumeration.uneven)))
    results, *_ = rounds(law, cases, dtype=dtype, width=None)
    assert_lossless(cases, results, tolerance)
    for case, result in zip(cases, results, strict=True):
        if case.shape == SHAPES["chain of 1"]:
            assert result.accepted == pytest.approx(case.p[0][np.argmax(case.drawn_from[0])], abs=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("ulps", [0, 1])
@pytest.mark.parametrize("law", LAWS)
def test_a_draft_that_equals_the_target_is_accepted_whole(law, ulps, dtype, tolerance):
    """A04: p == q, and p one ulp beside q."""
    rng = np.random.default_rng(13)
    cases = []
    for shape in SHAPES.values():
        p = [table.astype(dtype) for table in enumeration.tables(rng, VOCAB, DEPTH + 1, enumeration.uneven)]
        q = p
        if ulps:
            q = [np.nextafter(table, rng.integers(0, 2, table.shape).astype(dtype)) for table in p]
        cases.append(Case(shape, p, q, q))
    results, *_ = rounds(law, cases, dtype=dtype)
    assert_lossless(cases, results, tolerance)
    for case, result in zip(cases, results, strict=True):
        # On the pruned shape a path may end early; elsewhere the first child always stands, and so on down.
        if case.shape in (SHAPES["chain of 3"], SHAPES["2x2 level by level"]):
            assert result.accepted == pytest.approx(case.shape.depth, abs=1e-5)


def test_the_enumeration_sees_a_draft_law_from_before_the_filters():
    """A02: x is drawn from the filtered q but judged with the raw softmax. It accepts more, and it is wrong."""
    rng = np.random.default_rng(19)
    p = enumeration.tables(rng, VOCAB, DEPTH + 1, enumeration.uneven)
    seeds = rng.integers(2**32, size=2)
    raw, kept = (
        enumeration.tables(
            np.random.default_rng(seeds), VOCAB, DEPTH + 1, lambda rng, vocab, k=k: softmax(rng, vocab, k)
        )
        for k in (0, 2)
    )
    cases = [Case(SHAPES["chain of 2"], p, q, kept) for q in (kept, raw)]
    for law in LAWS:
        (right, wrong), *_ = rounds(law, cases)
        plain = oracle.plain_law(p[:3])
        assert oracle.distance(right.joint(p), plain) < 1e-9
        assert oracle.distance(wrong.joint(p), plain) > 1e-2
        assert wrong.accepted > right.accepted


def softmax(rng, vocab, top_k):
    return oracle.sorted_law(rng.normal(size=vocab) * 2, 1.0, top_k=top_k)


@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 3, "top_p": 0.9, "min_p": 0.05}]
)
def test_filtered_laws_of_the_engine_are_lossless_against_the_sorted_reference(filters):
    """A02, G11: the filters apply to every position, p and q alike; what they remove never appears."""
    rng = np.random.default_rng(20)
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    row = RowSampling(*(jnp.asarray([x]) for x in (0.8, options["top_k"], options["top_p"], options["min_p"])))
    logits = {x: enumeration.tables(rng, VOCAB, DEPTH + 1, lambda rng, vocab: rng.normal(size=vocab) * 2) for x in "pq"}

    def final(tables):
        flat = np.concatenate([table.reshape(-1, VOCAB) for table in tables]).astype(np.float32)
        law = np.asarray(FINAL_LAW(jnp.asarray(flat)[None], row))[0]
        ends = np.cumsum([table.size // VOCAB for table in tables])[:-1]
        return [part.reshape(table.shape) for part, table in zip(np.split(law, ends), tables, strict=True)]

    p, q = final(logits["p"]), final(logits["q"])
    cases = [Case(shape, p, q, q) for shape in SHAPES.values()]
    sorted_p = [np.apply_along_axis(oracle.sorted_law, -1, table, 0.8, **filters) for table in logits["p"]]
    for law in LAWS:
        results, *_ = rounds(law, cases, dtype="float32")
        for case, result in zip(cases, results, strict=True):
            plain = oracle.plain_law(sorted_p[: case.shape.depth + 1])
            committed = result.joint(sorted_p)
            assert oracle.distance(committed, plain) < 1e-5
            assert committed[plain == 0].max(initial=0) == 0


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("law", LAWS)
def test_verdicts_equal_the_law_by_the_book(law, drawn):
    """Row by row against plain NumPy in float64: every chance, the path and the law of the last token; random coins."""
    rng = np.random.default_rng(14)
    for pair in PAIRS:
        cases = cases_of(pair, 15)
        if not drawn:
            cases = [case._replace(q=None) for case in cases * 40]
        batch, _ = enumeration.plan(cases, VOCAB, DRAFTED, rng)
        pick = rng.permutation(len(batch["chance"]))[:300]
        batch = {name: array[pick] for name, array in batch.items()}
        # Below 1, as real coins are: what stands for certain must not be rejected.
        settled = np.minimum(batch["coin"], 1 - 2**-53)
        batch["coin"] = np.where(rng.random(settled.shape) < 0.5, settled, rng.random(settled.shape))
        with jax.enable_x64(True):
            verdict = enumeration.evaluate(LAWS[law], batch, drawn=drawn, dtype="float64", depth=DEPTH, width=300)
        for b in range(len(pick)):
            path, accept_J, last_V = oracle.plain_verdict(PLAIN[law], batch, b, drawn=drawn)
            assert verdict.path_BD[b].tolist() == path + [0] * (DEPTH - len(path))
            assert verdict.n_accepted_B[b] == len(path)
            np.testing.assert_allclose(verdict.accept_prob_BJ[b], accept_J, atol=1e-9)
            np.testing.assert_allclose(verdict.last_BV[b] / verdict.last_BV[b].sum(), last_V, atol=1e-9)


@pytest.mark.parametrize("law", LAWS)
def test_the_law_by_the_book_is_lossless_itself(law):
    """The oracle summed over all drafts and outcomes, in float64, with nothing of the product in it."""
    rng = np.random.default_rng(16)
    for pair in ("random", "filtered", "target one-hot"):
        for name in ("chain of 3", "2x2 level by level", "uneven"):
            p, q = (enumeration.tables(rng, 3, DEPTH + 1, kind) for kind in PAIRS[pair])
            cases = [Case(SHAPES[name], p, q, q)]
            batch, owner = enumeration.plan(cases, 3, DRAFTED, rng)
            count = len(owner)
            verdict = verify.Verdict(
                np.zeros(count, np.int64),
                np.zeros((count, DEPTH), np.int64),
                np.zeros((count, DRAFTED)),
                np.zeros((count, 3)),
            )
            for b in range(count):
                path, verdict.accept_prob_BJ[b], verdict.last_BV[b] = oracle.plain_verdict(
                    PLAIN[law], batch, b, drawn=True
                )
                verdict.n_accepted_B[b] = len(path)
                verdict.path_BD[b, : len(path)] = path
            (result,) = enumeration.committed(cases, batch, owner, verdict, 3, whole_path=law == "token")
            assert oracle.distance(result.joint(p), oracle.plain_law(p[: cases[0].shape.depth + 1])) < 1e-9


def test_block_accepts_more_than_token_and_on_a_chain_never_less():
    """Mean accepted length over 200 pairs of random laws, exactly; the two are equal where q is one-hot."""
    rng = np.random.default_rng(17)
    names = ("chain of 2", "chain of 3", "2x2 level by level", "uneven")
    accepted = {law: {name: [] for name in names} for law in LAWS}
    for _ in range(5):
        cases = []
        for name in names:
            for _ in range(40 if "chain" in name else 8):
                p, q = (enumeration.tables(rng, 3, DEPTH + 1, enumeration.uneven) for _ in "pq")
                cases.append(Case(SHAPES[name], p, q, q))
        for law in LAWS:
            results, *_ = rounds(law, cases, vocab=3, width=None)
            for case, result in zip(cases, results, strict=True):
                name = next(name for name in names if SHAPES[name] == case.shape)
                accepted[law][name].append(result.accepted)
    gains = {name: np.subtract(accepted["block"][name], accepted["token"][name]) for name in names}
    for name, gain in gains.items():
        assert gain.mean() > 0.005, name
    for name in names[:2]:
        assert gains[name].min() > -1e-12


def test_block_is_token_where_drafts_are_undrawn_on_a_chain():
    rng = np.random.default_rng(18)
    cases = []
    for _ in range(50):
        p, likely = (enumeration.tables(rng, VOCAB, DEPTH + 1, enumeration.uneven) for _ in "pq")
        cases.append(Case(SHAPES["chain of 3"], p, None, likely))
    token, block = (rounds(law, cases, width=None)[0] for law in LAWS)
    for one, other in zip(token, block, strict=True):
        assert one.accepted == pytest.approx(other.accepted, abs=1e-12)
