"""The acceptance laws: which drafted tokens stand, and what the last token of a round is drawn from.

p is the final law of the target after a node, q the final law that a node's children were drawn from. Each law is one
pure function of arrays over any topology, a chain being its one-path case. The acceptance probabilities that it returns
are the numbers that decide, so that its output law can be summed exactly. docs/laws.md has the proofs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import sizes
from jaxspec.speculate.residual import Left, Round, at, at_most_one, choose, last_weights, reject
from jaxspec.speculate.topology import Drafts, Topology, ancestors


class Verdict(NamedTuple):
    """What a law says of a round of drafts."""

    n_accepted_B: jax.Array  # i32, length of the accepted path
    path_BD: jax.Array  # i32, nodes of the accepted path by depth, 0 past its end
    accept_prob_BJ: jax.Array  # chance that draft j stood when it was tested: coin_j < accept_prob_j; 0 if it was not
    last_BV: jax.Array  # unnormalised weights of the token that follows the accepted ones


class Match(NamedTuple):
    """What ``match_law`` says: nothing is left to draw."""

    n_accepted_B: jax.Array  # i32
    path_BD: jax.Array  # i32
    last_token_B: jax.Array  # i32


def token_law(p_BTV: jax.Array, drafts: Drafts, coin_BJ: jax.Array, depth: int) -> Verdict:
    """Token-wise rejection, from the root down.

    On a chain Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2): x stands with chance
    min(1, p(x) / q(x)); at the first rejection the last token comes from max(p - q, 0), and from p if all stand. On a
    tree recursive rejection without replacement (SpecInfer, Miao et al. 2024; EAGLE, Li et al. 2024): children are
    tried in draw order, and a rejected one leaves p <- norm(max(p - q, 0)) and q <- q without it, renormalised, to the
    next. An undrawn draft stands with chance p(x), else x leaves p.

    Args:
        p_BTV: final target laws after the nodes 0..J, so J + 1 of them.
        drafts: a drafted token that q cannot say (q(x) = 0) counts as padding.
        coin_BJ: uniforms in [0, 1), independent of the drafts.
        depth: static bound on the depth of live drafts.
    """
    round_ = Round.of(p_BTV, drafts, coin_BJ)
    if round_.live_BJ.shape[1] == 0:
        return _nothing_drafted(p_BTV, depth)

    class State(NamedTuple):
        node_B: jax.Array  # the last accepted node
        left: Left  # of its laws
        accept_BJ: jax.Array

    # Parents come before children and siblings lie in draw order, so one walk over the drafts meets every test in turn.
    def test(j: jax.Array, state: State) -> State:
        tested_B = round_.live_BJ[:, j] & (round_.parent_BJ[:, j] == state.node_B)
        j_B = jnp.full_like(state.node_B, j)
        chance_B = at_most_one(state.left.weight(round_.p_BJ[:, j], round_.q_BJ[:, j]), round_.q_BJ[:, j])
        chance_B = jnp.where(tested_B, chance_B, 0)
        stands_B = coin_BJ[:, j] < chance_B
        rejected_B = tested_B & ~stands_B
        followed_B = rejected_B & round_.followed_BJ[:, j]
        _, after = reject(round_, state.node_B, j_B, jnp.ones_like(chance_B), state.left, followed_B)
        left = choose(rejected_B, after, state.left)
        left = choose(stands_B, Left.whole(chance_B), left)
        return State(jnp.where(stands_B, j + 1, state.node_B), left, state.accept_BJ.at[:, j].set(chance_B))

    root_B = jnp.zeros(p_BTV.shape[:1], jnp.int32)
    start = State(root_B, Left.whole(p_BTV[:, 0, 0]), jnp.zeros_like(round_.p_BJ))
    end = lax.fori_loop(0, round_.live_BJ.shape[1], test, start)
    path = _climb(drafts.topology, end.node_B, depth)
    return Verdict(*path, end.accept_BJ, last_weights(round_, end.node_B, end.left))


def block_law(p_BTV: jax.Array, drafts: Drafts, coin_BJ: jax.Array, depth: int) -> Verdict:
    """Block verification: from the leaves up, so that a late draft may save the early ones.

    On a chain Sun et al. 2024 (algorithm 2); on a tree traversal verification (Weng et al. 2025, algorithm 2), whose
    one-path case it is. alpha(root) = 1, alpha(child) = min(1, alpha(parent) p(x) / q(x)). The first leaf in draw order
    stands with chance alpha, and the whole path to it with it. If it does not, it is deleted; at its parent
    r = max(alpha p - q, 0), S = sum r, then alpha <- S / (S + 1 - alpha), p <- r / S and q <- q without it,
    renormalised; the alphas below follow, and the next leaf is tested. The root always stands. The last token comes
    from the p of the node that stood.

    Arguments as ``token_law``. It never accepts fewer tokens than that on a chain, in expectation over the coins.
    """
    round_ = Round.of(p_BTV, drafts, coin_BJ)
    rows, drafted = round_.live_BJ.shape
    if drafted == 0:
        return _nothing_drafted(p_BTV, depth)
    round_, tour = _tour(round_, drafts.topology)
    undecided = -1

    class State(NamedTuple):
        time: jax.Array
        node_B: jax.Array  # the node that stood, or undecided
        alpha_BT: jax.Array
        left: Left  # [B, T]
        accept_BJ: jax.Array

    def going(state: State) -> jax.Array:
        return jnp.any((state.node_B == undecided) & (state.time < tour.length_B))

    def visit(state: State) -> State:
        event_B = lax.dynamic_index_in_dim(tour.event_BE, state.time, axis=1, keepdims=False)
        visits_B = (state.node_B == undecided) & (event_B >= 0)
        leaves_B = visits_B & (event_B % 2 == 1)
        j_B = jnp.maximum(event_B, 0) // 2
        parent_B = at(round_.parent_BJ, j_B)
        p_B, q_B = at(round_.p_BJ, j_B), at(round_.q_BJ, j_B)
        left: Left = jax.tree.map(lambda x_BT: at(x_BT, parent_B), state.left)
        alpha_B = at(state.alpha_BT, parent_B)

        # On the way down: its alpha, from its parent as that is by now.
        entered_B = at_most_one(alpha_B * left.weight(p_B, q_B), q_B)
        # On the way up, all its children deleted: a leaf.
        chance_B = jnp.where(leaves_B, at(state.alpha_BT, j_B + 1), 0)
        stands_B = at(coin_BJ, j_B) < chance_B
        rejected_B = leaves_B & ~stands_B
        # The root's alpha stays 1, so that its residual need not be weighed for itself.
        weighed_B = rejected_B & ((parent_B > 0) | at(round_.followed_BJ, j_B))
        mass_B, after = reject(round_, parent_B, j_B, alpha_B, left, weighed_B)
        fallen_B = jnp.where(alpha_B < 1, mass_B / jnp.where(alpha_B < 1, mass_B + (1 - alpha_B), 1), 1)

        nodes_T = jnp.arange(drafted + 1)[None, :]
        is_own_BT = (nodes_T == j_B[:, None] + 1) & (visits_B & ~leaves_B)[:, None]
        is_parent_BT = (nodes_T == parent_B[:, None]) & rejected_B[:, None]
        alpha_BT = jnp.where(is_own_BT, entered_B[:, None], state.alpha_BT)
        alpha_BT = jnp.where(is_parent_BT, fallen_B[:, None], alpha_BT)
        left = jax.tree.map(lambda x_BT, x_B: jnp.where(is_parent_BT, x_B[:, None], x_BT), state.left, after)
        is_tested_BJ = (nodes_T[:, 1:] == j_B[:, None] + 1) & leaves_B[:, None]
        accept_BJ = jnp.where(is_tested_BJ, chance_B[:, None], state.accept_BJ)
        node_B = jnp.where(stands_B, j_B + 1, state.node_B)
        return State(state.time + 1, node_B, alpha_BT, left, accept_BJ)

    is_root_BT = jnp.broadcast_to(jnp.arange(drafted + 1)[None, :] == 0, (rows, drafted + 1))
    alpha_BT = is_root_BT.astype(p_BTV.dtype)
    undecided_B = jnp.full((rows,), undecided, jnp.int32)
    start = State(jnp.int32(0), undecided_B, alpha_BT, Left.whole(alpha_BT), jnp.zeros_like(round_.p_BJ))
    end = lax.while_loop(going, visit, start)
    node_B = jnp.maximum(end.node_B, 0)
    left = jax.tree.map(lambda x_BT: at(x_BT, node_B), end.left)
    return Verdict(*_climb(drafts.topology, node_B, depth), end.accept_BJ, last_weights(round_, node_B, left))


def match_law(choice_BT: jax.Array, drafts: Drafts, depth: int) -> Match:
    """Descends while a live child holds the token that the target chose at its parent.

    Greedy decoding (the choice is the argmax), and the coupled law (the choice is argmax(log p + g) with noise g that
    belongs to the seed, the absolute position and the token id; Daliri et al. 2024): the text is that of the choices
    alone, whatever was drafted.
    """
    size = sizes(tokens_BJ=drafts.tokens_BJ, live_BJ=drafts.live_BJ, parent_BJ=drafts.topology.parent_BJ)
    rows, drafted = size["B"], size["J"]
    if choice_BT.shape != (rows, drafted + 1):
        raise ValueError(f"choice_BT: expected {drafted + 1} nodes of {rows} rows, got shape {choice_BT.shape}")
    node_B = jnp.zeros((rows,), jnp.int32)
    path = [node_B] * depth
    if drafted:
        parent_BJ = drafts.topology.parent_BJ
        chosen_BJ = drafts.live_BJ & (drafts.tokens_BJ == jnp.take_along_axis(choice_BT, parent_BJ, axis=1))
        nodes_J = jnp.arange(1, drafted + 1, dtype=jnp.int32)[None, :]
        going_B = jnp.ones((rows,), bool)
        for level in range(depth):
            below_BJ = chosen_BJ & (parent_BJ == node_B[:, None])
            # Node 0 is nobody's child, so 0 says that there is none.
            path[level] = jnp.where(going_B, jnp.max(jnp.where(below_BJ, nodes_J, 0), axis=1), 0)
            going_B = path[level] > 0
            node_B = jnp.where(going_B, path[level], node_B)
    path_BD = jnp.stack(path, axis=1) if depth else jnp.zeros((rows, 0), jnp.int32)
    return Match(jnp.sum(path_BD > 0, axis=1, dtype=jnp.int32), path_BD, at(choice_BT, node_B))


def _nothing_drafted(p_BTV: jax.Array, depth: int) -> Verdict:
    rows = p_BTV.shape[0]
    none_B = jnp.zeros((rows,), jnp.int32)
    return Verdict(none_B, jnp.zeros((rows, depth), jnp.int32), jnp.zeros((rows, 0), p_BTV.dtype), p_BTV[:, 0])


def _climb(topology: Topology, node_B: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
    """How deep a node lies, and the path to it."""
    parent_BT, depth_BT = (jnp.pad(x_BJ, ((0, 0), (1, 0))) for x_BJ in topology)
    n_accepted_B = at(depth_BT, node_B)
    path = []
    for level in range(depth, 0, -1):
        is_here_B = n_accepted_B >= level
        path.append(jnp.where(is_here_B, node_B, 0))
        node_B = jnp.where(is_here_B, at(parent_BT, node_B), node_B)
    path_BD = jnp.stack(path[::-1], axis=1) if depth else jnp.zeros((node_B.shape[0], 0), jnp.int32)
    return n_accepted_B, path_BD


class _Tour(NamedTuple):
    """A walk round the live drafts, depth first: down into draft j is event 2 j, back up from it 2 j + 1."""

    event_BE: jax.Array  # i32, -1 past the end
    length_B: jax.Array


def _tour(round_: Round, topology: Topology) -> tuple[Round, _Tour]:
    """The tour, and the round with nothing live below what is not."""
    drafted = round_.live_BJ.shape[1]
    above_BJJ = ancestors(topology)[:, 1:, 1:]
    live_BJ = jnp.all(~above_BJJ | round_.live_BJ[:, None, :], axis=-1)
    below_BJ = jnp.sum(above_BJJ & live_BJ[:, :, None], axis=1, dtype=jnp.int32)
    order_J = jnp.arange(drafted, dtype=jnp.int32)
    is_earlier_JJ = order_J[None, :] < order_J[:, None]
    is_sibling_BJJ = round_.parent_BJ[:, :, None] == round_.parent_BJ[:, None, :]
    # Drafts to the left of j: below the earlier siblings of j and of what is above it.
    beside_BJ = jnp.sum(jnp.where(is_sibling_BJJ & is_earlier_JJ[None], below_BJ[:, None, :], 0), axis=-1)
    before_BJ = jnp.sum(jnp.where(above_BJJ, beside_BJ[:, None, :], 0), axis=-1)
    down_BJ = topology.depth_BJ - 1 + 2 * before_BJ
    up_BJ = down_BJ + 2 * below_BJ - 1

    times_BE = jnp.concatenate([down_BJ, up_BJ], axis=1)
    times_BE = jnp.where(jnp.concatenate([live_BJ, live_BJ], axis=1), times_BE, 2 * drafted)
    events_E = jnp.concatenate([2 * order_J, 2 * order_J + 1])
    empty_E = jnp.full((2 * drafted,), -1, jnp.int32)
    event_BE = jax.vmap(lambda times_E: empty_E.at[times_E].set(events_E, mode="drop"))(times_BE)
    return round_._replace(live_BJ=live_BJ), _Tour(event_BE, 2 * jnp.sum(live_BJ, axis=1, dtype=jnp.int32))
