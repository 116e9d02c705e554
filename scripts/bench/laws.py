"""What judging a round costs beside the pass that it judges: filters, law and commit over a target pass of width 8.

The logits are the model's own, of the last 8 tokens of a text; the drafts are those tokens, so that acceptance is that
of real text. A second vocabulary, of Llama 3's size, has the same logits and then ids that hardly ever come; its pass
is that of the same layers with a head of that size.
"""

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint import open_checkpoint
from jaxspec.engine.engine import Engine
from jaxspec.model.cache import empty_cache
from jaxspec.model.llama import ModelDef, define, random_params
from jaxspec.speculate.judge import Law, Round, judge
from jaxspec.speculate.sampling import RowSampling, round_uniforms
from jaxspec.speculate.state import Context
from jaxspec.speculate.step import Decoder
from jaxspec.speculate.topology import Drafts, chain
from jaxspec.text import Tokenizer
from scripts.bench.passes import Bare
from scripts.bench.timing import interleaved, ratio, seconds

WIDTH: Final = 8
WINDOW: Final = 256
LLAMA3_VOCAB: Final = 128_256
TEXT: Final = (
    "The morning after the storm, the harbour was quieter than anyone could remember. Boats lay on their sides, and "
    "the old lighthouse keeper walked along the wall, counting the windows that were still whole."
)
# temperature, top-k, top-p, min-p
SAMPLING: Final = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "T=1": (1.0, 0, 1.0, 0.0),
    "T=0.7 top-p 0.9": (0.7, 0, 0.9, 0.0),
    "T=1 top-p 0.99": (1.0, 0, 0.99, 0.0),
    "T=1 min-p 0.05": (1.0, 0, 1.0, 0.05),
    "T=0.7 top-k 50 top-p 0.9": (0.7, 50, 0.9, 0.0),
}


def law_costs(engine: Engine, checkpoint: Path, repeats: int) -> dict[str, Any]:
    """By vocabulary size and sampling: milliseconds and their share of the pass, for every law."""
    target, params = engine.programs.decoder.target, engine.programs.params.target
    tokenizer_dir = open_checkpoint(checkpoint).tokenizer_dir
    ids = Tokenizer.load(tokenizer_dir).encode(TEXT, add_bos=False) if tokenizer_dir else list(range(64))
    logits_BTV = _logits(target, params, ids)
    wide = define(
        dataclasses.replace(target.config, vocab_size=LLAMA3_VOCAB), target.sharding, target.dtype, target.cache_dtype
    )
    short = LLAMA3_VOCAB - target.config.vocab_size
    wide_logits_BTV = jnp.pad(logits_BTV, ((0, 0), (0, 0), (0, short)), constant_values=jnp.min(logits_BTV))
    drafts_J = jnp.asarray(ids[-WIDTH + 1 :], jnp.int32)
    passes = {
        target.config.vocab_size: (logits_BTV, lambda: Bare(target, params, 1, WINDOW, WIDTH)),
        LLAMA3_VOCAB: (wide_logits_BTV, lambda: Bare(wide, random_params(wide, seed=0), 1, WINDOW, WIDTH)),
    }
    return {
        str(vocab): _vocabulary(engine.programs.decoder, logits_BTV, drafts_J, make(), repeats)
        for vocab, (logits_BTV, make) in passes.items()
    }


def _logits(target: ModelDef, params: dict[str, jax.Array], ids: list[int]) -> jax.Array:
    """[1, WIDTH, V], after each of the tokens before the last WIDTH - 1 and of those."""

    def forward(params: dict[str, jax.Array], tokens_BT: jax.Array) -> jax.Array:
        model = target.merge(params)
        positions_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        empty = empty_cache(target.config, target.sharding, 1, tokens_BT.shape[1], target.cache_dtype)
        return model.logits(model(tokens_BT, positions_BT, empty).hidden_BTD[:, -WIDTH:])

    return jax.block_until_ready(jax.jit(forward)(params, jnp.asarray([ids], jnp.int32)))


def _vocabulary(
    decoder: Decoder, logits_BTV: jax.Array, drafts_J: jax.Array, bare: Bare, repeats: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, sampling in SAMPLING.items():
        kinds = ["greedy"] if name == "greedy" else ["token", "token drawn", "block", "block drawn", "coupled"]
        calls = {kind: _judging(decoder, logits_BTV, drafts_J, kind, sampling) for kind in kinds}

        def timed(call: Callable[[], Any]) -> Callable[[], float]:
            return lambda: statistics.median(seconds(call) for _ in range(5))

        times = interleaved(repeats, timed(bare), *(timed(call) for call in calls.values()))
        pass_ms = round(1e3 * statistics.median(times[0]), 1)
        found[name] = {"pass, ms": pass_ms}
        for kind, own in zip(kinds, times[1:], strict=True):
            found[name][kind] = {**ratio(own, times[0]), "ms": round(1e3 * statistics.median(own), 2)}
    return found


def _judging(
    decoder: Decoder, logits_BTV: jax.Array, drafts_J: jax.Array, kind: str, sampling: tuple[float, int, float, float]
) -> Callable[[], Any]:
    """A call that judges and commits one round."""
    law = cast(Law, kind.split()[0] if kind != "greedy" else "block")
    vocab = logits_BTV.shape[-1]
    # A draft's law a little flatter than the target's: some are rejected.
    q_BJV = jax.nn.softmax(0.9 * logits_BTV[:, :-1], axis=-1) if "drawn" in kind else None

    def round_of(logits_BTV: jax.Array, rows: RowSampling, q_BJV: jax.Array | None) -> Any:
        state = jax.eval_shape(lambda: decoder.empty(1, WINDOW))
        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state._replace(target=None, drafter=None))
        length_B = jnp.full((1,), 64, jnp.int32)
        context = Context(state.tokens_BS, length_B, state.rows._replace(sampling=rows))
        drafts = Drafts(drafts_J[None], q_BJV, chain(1, WIDTH - 1), jnp.ones((1, WIDTH - 1), bool))
        round_ = Round(
            logits_BTV=logits_BTV,
            drafts=drafts,
            active_B=jnp.ones((1,), bool),
            uniforms=round_uniforms(state.rows.seed_B2, length_B, WIDTH - 1),
            desync_B=jnp.zeros((1,), bool),
        )
        judged = judge(context, round_, law, vocab, WIDTH - 1)
        tokens_BS = jax.lax.dynamic_update_slice_in_dim(context.tokens_BS, judged.tokens_BE, 64, axis=1)
        return tokens_BS, judged.n_accepted_B, judged.fault_B

    compiled = jax.jit(round_of)
    temperature, top_k, top_p, min_p = sampling
    rows = RowSampling(
        jnp.full((1,), temperature, jnp.float32),
        jnp.full((1,), top_k, jnp.int32),
        jnp.full((1,), top_p, jnp.float32),
        jnp.full((1,), min_p, jnp.float32),
    )
    return lambda: np.asarray(compiled(logits_BTV, rows, q_BJV)[0])
