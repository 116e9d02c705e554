"""What the law says of a round: logits in, the accepted path and the token after it out, with any fault."""

from typing import Final, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.speculate.noise import coupled_choice
from jaxspec.speculate.sampling import Uniforms, draw, final_law, first_argmax, mask_logits
from jaxspec.speculate.state import DESYNC, NOT_FINITE, TOP_LOGPROBS, Context, Logprobs
from jaxspec.speculate.topology import Drafts
from jaxspec.speculate.verify import Match, block_law, match_law, token_law
from jaxspec.speculate.window import Shown

Law = Literal["token", "block", "coupled"]
LAWS: Final = {"token": token_law, "block": block_law}


class Round(NamedTuple):
    """What is known before the law speaks, of T nodes: the root and the drafts."""

    logits_BTV: jax.Array
    drafts: Drafts
    active_B: jax.Array
    uniforms: Uniforms
    desync_B: jax.Array
    shown: Shown | None = None  # of a window beside them, which the law does not look at


def node_depths(drafts: Drafts) -> jax.Array:
    """int32 [B, T], how far below the root each node is."""
    return jnp.pad(drafts.topology.depth_BJ, ((0, 0), (1, 0)))


def nodes_fed(drafts: Drafts) -> jax.Array:
    """bool [B, T], which nodes count: the root and the live drafts."""
    return jnp.pad(drafts.live_BJ, ((0, 0), (1, 0)), constant_values=True)


class Judged(NamedTuple):
    """What the law said: accepted drafts by depth, then the last token, in tokens_BE (meaningless after it).

    E = D + 1 places; ``path_BD`` are the nodes of the accepted drafts.
    """

    n_accepted_B: jax.Array
    path_BD: jax.Array
    tokens_BE: jax.Array
    fault_B: jax.Array
    logprobs: Logprobs


def judge(context: Context, round_: Round, law: Law, valid_vocab: int, depth: int) -> Judged:
    """Faults and the law's verdict. ``depth`` (static): D, how deep live drafts can lie."""
    rows, drafts, logits_BTV = context.rows, round_.drafts, round_.logits_BTV
    depth_BT = node_depths(drafts)
    sound_BT = jnp.all(jnp.isfinite(logits_BTV), axis=-1)
    sound_B = jnp.all(sound_BT | ~nodes_fed(drafts), axis=1)
    fault_B = jnp.where(sound_B, jnp.where(round_.desync_B, DESYNC, 0), NOT_FINITE)
    fault_B = jnp.where(round_.active_B, fault_B, 0)

    ban_BT = context.length_B[:, None] + depth_BT < rows.min_length_B[:, None]
    masked_BTV = mask_logits(logits_BTV, rows.stop_ids_BE, ban_BT, valid_vocab)

    def greedy() -> Match:
        return match_law(first_argmax(masked_BTV), drafts, depth)

    def sampled() -> Match:
        p_BTV = final_law(masked_BTV, rows.sampling)
        if law == "coupled":
            # A node at depth d is followed by the token at absolute position n + d.
            choice_BT = coupled_choice(p_BTV, rows.seed_B2, context.length_B[:, None] + depth_BT)
            return match_law(choice_BT, drafts, depth)
        verdict = LAWS[law](p_BTV, drafts, round_.uniforms.coin_BJ[:, : drafts.tokens_BJ.shape[1]], depth)
        return Match(verdict.n_accepted_B, verdict.path_BD, draw(verdict.last_BV, round_.uniforms.last_B))

    any_sampled = jnp.any(round_.active_B & (rows.sampling.temperature_B > 0))
    match = jax.lax.cond(any_sampled, sampled, greedy)
    offsets_E = jnp.arange(depth + 1, dtype=jnp.int32)
    along_BD = jnp.take_along_axis(jnp.pad(drafts.tokens_BJ, ((0, 0), (1, 0))), match.path_BD, axis=1)
    is_last_BE = offsets_E[None, :] == match.n_accepted_B[:, None]
    tokens_BE = jnp.where(is_last_BE, match.last_token_B[:, None], jnp.pad(along_BD, ((0, 0), (0, 1))))
    logprobs = _logprobs(logits_BTV, match.path_BD, tokens_BE, rows.wants_logprobs_B)
    return Judged(match.n_accepted_B, match.path_BD, tokens_BE, fault_B, logprobs)


def _logprobs(logits_BTV: jax.Array, path_BD: jax.Array, tokens_BE: jax.Array, wants_B: jax.Array) -> Logprobs:
    """Under the target's own law, before bans and filters; computed only when some row wants them."""
    B, _, V = logits_BTV.shape
    E = tokens_BE.shape[1]
    count = min(TOP_LOGPROBS, V)

    def compute() -> Logprobs:
        nodes_BE = jnp.pad(path_BD, ((0, 0), (1, 0)))
        logits_BEV = jax.vmap(lambda logits_TV, nodes_E: logits_TV[nodes_E])(logits_BTV, nodes_BE)
        normal_BEV = jax.nn.log_softmax(logits_BEV, axis=-1)
        chosen_BE = jnp.take_along_axis(normal_BEV, tokens_BE[:, :, None], axis=-1)[..., 0]
        top, ids = jax.lax.top_k(normal_BEV.reshape(B * E, V), count)
        return Logprobs(chosen_BE, top.reshape(B, E, count), ids.reshape(B, E, count))

    def nothing() -> Logprobs:
        return Logprobs(
            jnp.zeros((B, E), jnp.float32), jnp.zeros((B, E, count), jnp.float32), jnp.zeros((B, E, count), jnp.int32)
        )

    return jax.lax.cond(jnp.any(wants_B), compute, nothing)
