"""What the law says of a round: logits in, accepted drafts and the token after them out, with any fault."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.model.llama import Llama
from jaxspec.speculate.drafters import Proposal
from jaxspec.speculate.sampling import Uniforms, draw, final_law, first_argmax, mask_logits
from jaxspec.speculate.state import DESYNC, NOT_FINITE, TOP_LOGPROBS, Context, Logprobs
from jaxspec.speculate.verify import greedy_law, token_law


class Round(NamedTuple):
    """What is known before the law speaks."""

    hidden_BTD: jax.Array
    proposal: Proposal | None
    gamma_B: jax.Array
    active_B: jax.Array
    uniforms: Uniforms
    desync_B: jax.Array


class Judged(NamedTuple):
    """What the law said: accepted drafts, then the last token, in tokens_BT (meaningless after it)."""

    n_accepted_B: jax.Array
    tokens_BT: jax.Array
    fault_B: jax.Array
    logprobs: Logprobs


def judge(model: Llama, context: Context, round_: Round, valid_vocab: int) -> Judged:
    """Logits, faults and the law's verdict."""
    rows = context.rows
    logits_BTV = model.logits(round_.hidden_BTD)
    offsets_T = jnp.arange(logits_BTV.shape[1], dtype=jnp.int32)[None, :]
    sound_BT = jnp.all(jnp.isfinite(logits_BTV), axis=-1)
    sound_B = jnp.all(sound_BT | (offsets_T > round_.gamma_B[:, None]), axis=1)
    fault_B = jnp.where(sound_B, jnp.where(round_.desync_B, DESYNC, 0), NOT_FINITE)
    fault_B = jnp.where(round_.active_B, fault_B, 0)

    ban_BT = context.length_B[:, None] + offsets_T < rows.min_length_B[:, None]
    masked_BTV = mask_logits(logits_BTV, rows.stop_ids_BE, ban_BT, valid_vocab)
    proposal = round_.proposal
    draft_BJ = jnp.zeros((ban_BT.shape[0], 0), jnp.int32) if proposal is None else proposal.tokens_BJ
    coin_BJ = round_.uniforms.coin_BJ[:, : draft_BJ.shape[1]]

    def greedy() -> tuple[jax.Array, jax.Array]:
        verdict = greedy_law(first_argmax(masked_BTV), draft_BJ, round_.gamma_B)
        return verdict.n_accepted_B, verdict.last_token_B

    def sampled() -> tuple[jax.Array, jax.Array]:
        p_BTV = final_law(masked_BTV, rows.sampling)
        q_BJV = None if proposal is None else proposal.q_BJV
        verdict = token_law(p_BTV, q_BJV, draft_BJ, round_.gamma_B, coin_BJ)
        return verdict.n_accepted_B, draw(verdict.last_BV, round_.uniforms.last_B)

    any_sampled = jnp.any(round_.active_B & (rows.sampling.temperature_B > 0))
    n_accepted_B, last_B = jax.lax.cond(any_sampled, sampled, greedy)
    tokens_BT = jnp.where(offsets_T == n_accepted_B[:, None], last_B[:, None], _padded(draft_BJ))
    return Judged(n_accepted_B, tokens_BT, fault_B, _logprobs(logits_BTV, tokens_BT, rows.wants_logprobs_B))


def _padded(draft_BJ: jax.Array) -> jax.Array:
    return jnp.pad(draft_BJ, ((0, 0), (0, 1)))


def _logprobs(logits_BTV: jax.Array, tokens_BT: jax.Array, wants_B: jax.Array) -> Logprobs:
    """Under the target's own law, before bans and filters; computed only when some row wants them."""
    B, T, V = logits_BTV.shape
    count = min(TOP_LOGPROBS, V)

    def compute() -> Logprobs:
        normal_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
        chosen_BT = jnp.take_along_axis(normal_BTV, tokens_BT[:, :, None], axis=-1)[..., 0]
        top, ids = jax.lax.top_k(normal_BTV.reshape(B * T, V), count)
        return Logprobs(chosen_BT, top.reshape(B, T, count), ids.reshape(B, T, count))

    def nothing() -> Logprobs:
        return Logprobs(
            jnp.zeros((B, T), jnp.float32), jnp.zeros((B, T, count), jnp.float32), jnp.zeros((B, T, count), jnp.int32)
        )

    return jax.lax.cond(jnp.any(wants_B), compute, nothing)
