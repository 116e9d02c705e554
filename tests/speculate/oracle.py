"""What the laws must equal, written the slow and plain way: NumPy, float64, sorting."""

import numpy as np
from scipy import stats

# Seeds are fixed, so a chi-square test cannot flicker; this is the chance that a change of the random numbers alone
# (and not of their law) turns one red.
FALSE_ALARM = 1e-6


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


def plain_token_law(p, q, children, coins):
    """The token law on one row, by the book: dicts and whole laws. ``p``, ``q`` by node, ``q[None]``: undrawn.

    Returns accepted path, chances by node, law of the last token.
    """
    node, path, chances = 0, [], {}
    while True:
        left, stood = p[node].copy(), None
        drawn = None if q is None else q[node].copy()
        for child, token in children[node]:
            drawn_from = np.eye(left.size)[token] if drawn is None else drawn
            if drawn_from[token] == 0:
                continue
            drawn_from = drawn_from / drawn_from.sum()
            chances[child] = min(1.0, left[token] / drawn_from[token])
            if coins[child] < chances[child]:
                stood = child
                break
            rest = np.maximum(left - drawn_from, 0)
            left = rest / rest.sum() if rest.sum() > 0 else np.zeros_like(rest)
            if drawn is not None:
                drawn[token] = 0
        if stood is None:
            return path, chances, left if left.sum() > 0 else p[node]
        node = stood
        path.append(stood)


def plain_block_law(p, q, children, coins):
    """The block law on one row, by the book: a recursion that deletes leaves and recomputes every alpha anew."""
    parent = {child: node for node, own in children.items() for child, _ in own}
    token_of = {child: token for own in children.values() for child, token in own}
    law = {node: p[node].copy() for node in children}
    drawn = None if q is None else {node: q[node].copy() for node in children}
    remaining = {node: [child for child, _ in own] for node, own in children.items()}
    deleted_alpha, chances = {0: 1.0}, {}  # alpha of nodes that lost a child is set, not computed

    def drawn_from(node, token):
        if drawn is None:
            return np.eye(law[node].size)[token]
        mass = drawn[node].sum()
        return drawn[node] / mass if mass > 0 else drawn[node]

    def drop_unsayable(node):
        for child in list(remaining[node]):
            if drawn is not None and q[node][token_of[child]] == 0:
                remaining[node].remove(child)
            else:
                drop_unsayable(child)

    def alpha(node):
        if node in deleted_alpha:
            return deleted_alpha[node]
        above, token = parent[node], token_of[node]
        chance = alpha(above) * law[above][token] / drawn_from(above, token)[token]
        return min(1.0, chance)

    drop_unsayable(0)
    while True:
        leaf = 0
        while remaining[leaf]:
            leaf = remaining[leaf][0]
        if leaf == 0:
            break
        chances[leaf] = alpha(leaf)
        if coins[leaf] < chances[leaf]:
            break
        above, token = parent[leaf], token_of[leaf]
        rest = np.maximum(alpha(above) * law[above] - drawn_from(above, token), 0)
        mass, before = rest.sum(), alpha(above)
        deleted_alpha[above] = mass / (mass + (1 - before)) if mass > 0 or before < 1 else 1.0
        law[above] = rest / mass if mass > 0 else np.zeros_like(rest)
        if drawn is not None:
            drawn[above][token] = 0
        remaining[above].remove(leaf)
    path, node = [], leaf
    while node:
        path.insert(0, node)
        node = parent[node]
    return path, chances, law[leaf] if law[leaf].sum() > 0 else p[leaf]


def plain_verdict(law, batch, row, *, drawn):
    """``law`` (one of the two above) on one row of a planned batch, in the arrays of a Verdict."""
    parents, live = batch["parent"][row], batch["live"][row]
    nodes = [0, *(j + 1 for j in range(len(live)) if live[j])]
    children = {n: [(m, batch["tokens"][row][m - 1]) for m in nodes[1:] if parents[m - 1] == n] for n in nodes}
    p = {n: batch["p"][row, n] for n in nodes}
    q = {n: batch["q"][row, own[0][0] - 1] if own else p[n] for n, own in children.items()} if drawn else None
    path, chances, last_V = law(p, q, children, {n: batch["coin"][row, n - 1] for n in nodes[1:]})
    accept_J = np.array([chances.get(j + 1, 0.0) for j in range(len(live))])
    return path, accept_J, last_V / last_V.sum()


def plain_law(p):
    """The exact law of the first len(p) tokens of plain decoding."""
    law = p[0]
    for table in p[1:]:
        law = law[..., None] * table
    return law


def inverse(weights_BV, u_B):
    """Ids by inverting the cumulative sum, as ``sampling.draw``, for few ids and many rows."""
    upto_BV = np.cumsum(np.asarray(weights_BV, np.float64), -1)
    return (np.asarray(u_B)[:, None] * upto_BV[:, -1:] >= upto_BV).sum(-1)


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
