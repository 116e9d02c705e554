"""What the laws must equal, written the slow and plain way: NumPy, float64, sorting."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxspec.speculate.verify import token_law

# Seeds are fixed, so a chi-square test cannot flicker; this is the chance that a change of the random numbers alone
# (and not of their law) turns one red.
FALSE_ALARM = 1e-6

# A table of laws: prefix (a tuple of ids) -> law over the vocabulary.
Table = dict[tuple[int, ...], np.ndarray]


def sorted_law(logits_V, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The final law of one position, by sorting."""
    logits_V = np.asarray(logits_V, np.float64)
    if temperature == 0:
        return np.eye(logits_V.size)[np.argmax(logits_V)]
    p_V = np.exp((logits_V - logits_V.max()) / temperature)
    p_V /= p_V.sum()
    if 0 < top_k < logits_V.size:
        p_V = np.where(logits_V >= np.sort(logits_V)[-top_k], p_V, 0)
        p_V /= p_V.sum()
    if top_p < 1:
        order = np.argsort(-p_V, kind="stable")
        before = np.cumsum(p_V[order]) - p_V[order]
        least = p_V[order][before < max(top_p, 1e-300)].min()
        p_V = np.where(p_V >= least, p_V, 0)
        p_V /= p_V.sum()
    p_V = np.where(p_V >= min_p * p_V.max(), p_V, 0)
    return p_V / p_V.sum()


def prefixes(vocab, length):
    """Every tuple of ids of exactly this length, in order."""
    return itertools.product(range(vocab), repeat=length)


def table(rng, vocab, depth, law) -> Table:
    """One law per prefix of fewer than ``depth`` ids."""
    return {prefix: law(rng, vocab) for length in range(depth) for prefix in prefixes(vocab, length)}


def uneven(rng, vocab):
    """A random law with both heavy and light ids."""
    weights = rng.exponential(size=vocab) ** 2
    return weights / weights.sum()


def one_hot(rng, vocab):
    return np.eye(vocab)[rng.integers(vocab)]


def on_ids(ids):
    """Random laws whose support is ``ids`` alone."""

    def law(rng, vocab):
        weights = np.zeros(vocab)
        weights[list(ids)] = rng.exponential(size=len(ids)) + 0.05
        return weights / weights.sum()

    return law


def committed_law(p: Table, q: Table | None, undrawn: Table | None, gammas, vocab, bucket, dtype, drawn_from=None):
    """The exact law of what one round commits, for each gamma, with every number taken from ``token_law`` itself.

    Sums over all drafts (drawn from ``drawn_from``, q unless a test lies about it; or the single most likely one of
    ``undrawn``, where q is None) and all numbers of accepted drafts. What a round leaves open of the first gamma + 1
    tokens is completed by p. All gammas share one batch and one bucket; positions from gamma on hold garbage.

    Returns:
        Per gamma, an array over [V] * (gamma + 1), to be compared with ``plain_law``; and per gamma the expected
        number of accepted drafts.
    """
    drawn_from = drawn_from or q
    rng = np.random.default_rng(5)
    rows = []  # gamma, draft, chance of the draft, number of accepted drafts
    for gamma in gammas:
        for draft in prefixes(vocab, gamma):
            if drawn_from is not None:
                chance = np.prod([drawn_from[draft[:i]][x] for i, x in enumerate(draft)])
            else:
                chance = float(all(x == np.argmax(undrawn[draft[:i]]) for i, x in enumerate(draft)))
            rows += [(gamma, draft, chance, n) for n in range(gamma + 1) if chance > 0]

    p_BJV = np.eye(vocab)[rng.integers(vocab, size=(len(rows), bucket + 1))]
    q_BJV = np.eye(vocab)[rng.integers(vocab, size=(len(rows), bucket))]
    draft_BJ = rng.integers(vocab, size=(len(rows), bucket))
    coin_BJ = rng.random((len(rows), bucket))
    for b, (gamma, draft, _, n) in enumerate(rows):
        p_BJV[b, : gamma + 1] = [p[draft[:i]] for i in range(gamma + 1)]
        if q is not None and gamma:
            q_BJV[b, :gamma] = [q[draft[:i]] for i in range(gamma)]
        draft_BJ[b, :gamma] = draft
        coin_BJ[b, :gamma] = np.arange(gamma) >= n  # 0 accepts whatever may be accepted, 1 nothing
    verdict = jax.jit(token_law)(
        jnp.asarray(p_BJV, dtype),
        None if q is None else jnp.asarray(q_BJV, dtype),
        jnp.asarray(draft_BJ, jnp.int32),
        jnp.asarray([row[0] for row in rows], jnp.int32),
        jnp.asarray(coin_BJ, dtype),
    )
    n_accepted_B, accept_BJ, last_BV = (np.asarray(x) for x in verdict)
    assert np.isfinite(accept_BJ).all()
    assert np.isfinite(last_BV).all()
    accept_BJ, last_BV = accept_BJ.astype(np.float64), last_BV.astype(np.float64)

    laws = {gamma: np.zeros((vocab,) * (gamma + 1)) for gamma in gammas}
    accepted = dict.fromkeys(gammas, 0.0)
    for b, (gamma, draft, chance, n) in enumerate(rows):
        weight = chance * np.prod(accept_BJ[b, :n]) * (1 - accept_BJ[b, n] if n < gamma else 1)
        if weight == 0:
            continue
        assert n_accepted_B[b] == n, "the probabilities returned are not those that decide"
        accepted[gamma] += weight * n
        for last in np.flatnonzero(last_BV[b]):
            prefix = (*draft[:n], int(last))
            here = weight * last_BV[b, last] / last_BV[b].sum()
            for rest in prefixes(vocab, gamma - n):
                chain = prefix + rest
                laws[gamma][chain] += here * np.prod([p[chain[:i]][chain[i]] for i in range(n + 1, gamma + 1)])
    return laws, accepted


def plain_law(p: Table, vocab, length):
    """The exact law of the first ``length`` tokens of plain decoding."""
    law = np.zeros((vocab,) * length)
    for chain in prefixes(vocab, length):
        law[chain] = np.prod([p[chain[:i]][x] for i, x in enumerate(chain)])
    return law


def distance(law, other):
    """Total variation."""
    return np.abs(np.asarray(law, np.float64) - np.asarray(other, np.float64)).sum() / 2


def assert_follows(counts, law):
    """Chi-square of ``counts`` against ``law`` at FALSE_ALARM; what must not occur has not."""
    counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    assert counts[law == 0].sum() == 0
    expected = law * counts.sum()
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    limit = stats.chi2.isf(FALSE_ALARM, counts.size - 1)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < limit, f"chi-square {statistic:.1f} over {counts.size} cells, limit {limit:.1f}"
