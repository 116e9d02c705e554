"""What a model thinks of given tokens: log-probabilities, perplexity, logits. Is a conversion right?

The pass is the model's own forward over chunks of one fixed shape, so two programs compile however many sequences there
are, and memory holds one chunk of logits, never a whole sequence of them. Its ``jax.jit`` is the only one outside
``speculate/programs.py`` and the layer of ``model/llama.py``: scoring is no decoding and shares no state with it.
"""

import contextlib
import dataclasses
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import EngineFault, InvalidRequest, UserError
from jaxspec.model.cache import CACHE_AXES, KVCache, empty_cache
from jaxspec.model.llama import ModelDef
from jaxspec.speculate.programs import CHUNKS
from jaxspec.speculate.state import FAULTS, NOT_FINITE


@dataclasses.dataclass(frozen=True)
class Score:
    """One sequence. ``logprobs[i]``: natural log-probability of token i given those before it; None for the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]

    @property
    def scored(self) -> tuple[float, ...]:
        return tuple(logprob for logprob in self.logprobs if logprob is not None)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"token_ids": list(self.token_ids), "logprobs": list(self.logprobs), **totals([self])}


def totals(scores: Sequence[Score]) -> dict[str, Any]:
    """Over all sequences: ``num_scored`` tokens, ``total_logprob``, and ``perplexity`` = exp(-total / num_scored).

    The perplexity is None without scored tokens, or when it is beyond float64.
    """
    logprobs = [logprob for score in scores for logprob in score.scored]
    total = math.fsum(logprobs)
    perplexity = None
    if logprobs:
        with contextlib.suppress(OverflowError):
            perplexity = math.exp(-total / len(logprobs))
    return {"num_scored": len(logprobs), "total_logprob": total, "perplexity": perplexity}


class Part(NamedTuple):
    """One chunk of a sequence, its padding cut off."""

    logprobs_T: np.ndarray  # float32, of the token after each of the chunk's; the last of the sequence means nothing
    logits_TV: np.ndarray | None  # float32


class Scorer:
    """Scores sequences of at most ``longest`` tokens, one after the other, on the model's mesh."""

    def __init__(
        self, model: ModelDef, params: Mapping[str, jax.Array], *, longest: int, chunk: int, with_logits: bool
    ) -> None:
        self._params = params
        self._chunk = chunk
        slots = -(-longest // chunk) * chunk
        sharding = model.sharding

        def empty() -> KVCache:
            return empty_cache(model.config, sharding, 1, slots, model.dtype)

        layout = jax.tree.map(
            lambda x: sharding.named(CACHE_AXES, x.shape) if x.ndim == len(CACHE_AXES) else sharding.replicated,
            jax.eval_shape(empty),
        )

        def score_chunk(
            params: Mapping[str, jax.Array], cache: KVCache, tokens_T: jax.Array, next_T: jax.Array, start: jax.Array
        ) -> tuple[KVCache, jax.Array, jax.Array | None]:
            module = model.merge(params)
            # A padded tail writes past the sequence's end only, where the next sequence writes before it looks.
            positions_T = start + jnp.arange(chunk, dtype=jnp.int32)
            hidden_BTD, cache, _ = module(tokens_T[None], positions_T[None], cache)
            logits_TV = module.logits(hidden_BTD)[0]
            chosen_T = jnp.take_along_axis(logits_TV, next_T[:, None], axis=1)[:, 0]
            logprobs_T = chosen_T - jax.nn.logsumexp(logits_TV, axis=1)
            return cache, logprobs_T, logits_TV if with_logits else None

        outputs = (layout, sharding.replicated, sharding.replicated)
        self._score_chunk = jax.jit(score_chunk, donate_argnums=1, out_shardings=outputs)
        self._cache = jax.jit(empty, out_shardings=layout)()

    def parts(self, token_ids: Sequence[int]) -> Iterator[Part]:
        """Runs one sequence, chunk by chunk."""
        chunk = self._chunk
        tokens = np.zeros((-(-len(token_ids) // chunk) * chunk + 1,), np.int32)
        tokens[: len(token_ids)] = token_ids
        for start in range(0, len(token_ids), chunk):
            end = start + chunk
            self._cache, logprobs_T, logits_TV = self._score_chunk(
                self._params, self._cache, tokens[start:end], tokens[start + 1 : end + 1], np.int32(start)
            )
            count = min(chunk, len(token_ids) - start)
            logits = None if logits_TV is None else np.asarray(logits_TV)[:count]
            yield Part(np.asarray(logprobs_T)[:count], logits)


def score(
    model: ModelDef,
    params: Mapping[str, jax.Array],
    sequences: Sequence[Sequence[int]],
    logits_path: Path | None = None,
) -> list[Score]:
    """Scores every sequence; with ``logits_path`` its logits go there as ``logits_<i>`` [T, V] float32.

    Raises InvalidRequest naming an empty sequence or an id outside the vocabulary, UserError where the file cannot be
    written, EngineFault when the model's logits are not finite.
    """
    check_token_ids(sequences, model.config.vocab_size)
    longest = max(map(len, sequences))
    with contextlib.ExitStack() as stack:
        # Before the first pass: a path that cannot be written is found out at once.
        file = None if logits_path is None else stack.enter_context(LogitsFile(logits_path))
        chunk = next((size for size in CHUNKS if size >= longest), CHUNKS[-1])
        scorer = Scorer(model, params, longest=longest, chunk=chunk, with_logits=file is not None)
        scores = []
        for index, token_ids in enumerate(sequences):
            logprobs: list[float | None] = [None]
            with contextlib.ExitStack() as entry:
                rows = None
                if file is not None:
                    rows = entry.enter_context(file.array(index, (len(token_ids), model.config.vocab_size)))
                for part in scorer.parts(token_ids):
                    if not np.isfinite(part.logprobs_T).all():
                        raise EngineFault(f"sequence {index}: {FAULTS[NOT_FINITE]}")
                    logprobs += part.logprobs_T.tolist()
                    if rows is not None and part.logits_TV is not None:
                        rows.write(part.logits_TV.astype("<f4").tobytes())
            scores.append(Score(tuple(token_ids), tuple(logprobs[:-1])))
    return scores


def check_token_ids(sequences: Sequence[Sequence[object]], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first sequence or id that cannot be scored."""
    if not sequences:
        raise InvalidRequest("token-ids", [], "at least 1 list of token ids")
    for index, token_ids in enumerate(sequences):
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str) or not token_ids:
            raise InvalidRequest(f"token-ids[{index}]", token_ids, "a list of at least 1 token id")
        for position, token_id in enumerate(token_ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"token-ids[{index}][{position}]", token_id, f"a token id in [0, {vocab_size - 1}]"
                )


class LogitsFile:
    """An .npz that is written row by row, so that no array need be whole in memory. It appears when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._staged = path.parent / f".{path.name}.{os.getpid()}"

    def __enter__(self) -> Self:
        try:
            if self._path.is_dir():
                raise IsADirectoryError("it is a folder")
            self._zip = zipfile.ZipFile(self._staged, "w")
        except OSError as error:
            raise UserError(f"logits: expected a file that can be written, got {self._path} ({error})") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self._zip.close()
            if kind is None:
                self._staged.replace(self._path)
        finally:
            self._staged.unlink(missing_ok=True)

    @contextlib.contextmanager
    def array(self, index: int, shape: tuple[int, int]) -> Iterator[Any]:
        """A binary file that takes the rows of ``logits_<index>`` as little-endian float32 bytes."""
        with self._zip.open(f"logits_{index}.npy", "w", force_zip64=True) as rows:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(rows, header)
            yield rows
