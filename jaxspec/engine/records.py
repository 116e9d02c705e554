"""What the engine reports: chunks of a stream, the summary of a request, and the state of a server. All frozen."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from jaxspec.shapes import GAMMA_MAX

ORIGINS: Final = ("draft", "correction", "bonus", "plain", "forced")
FINISH_REASONS: Final = ("stop", "length", "abort")


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a committed token under the target's own law (natural logarithm, before the filters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most probable first; as many as asked for


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts of one request; a begin-of-sequence token that was added counts as prompt."""

    prompt_tokens: int
    completion_tokens: int


@dataclasses.dataclass(frozen=True)
class Timing:
    """Latencies of one request. None where too few tokens came to define the number."""

    ttft_ms: float | None  # from admission to the queue until the first token
    tpot_ms: float | None  # decoding time per token after the first
    tokens_per_s: float | None  # 1000 / tpot_ms: decoding alone


@dataclasses.dataclass(frozen=True)
class SpeculationSummary:
    """How well drafts served one request. Plain passes count in ``tokens_per_target_pass`` alone."""

    method: str
    num_spec_steps: int  # target passes that checked at least one drafted token
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float  # accepted / drafted, the bonus excluded; 0 when nothing was drafted
    mean_acceptance_length: float  # 1 + accepted / steps; 1 without steps
    tokens_per_target_pass: float  # committed tokens / target passes of decoding; 0 without passes
    acceptance_histogram: tuple[int, ...]  # [a]: steps that accepted exactly a drafts, a = 0..8

    @classmethod
    def of(
        cls, *, method: str, histogram: Sequence[int], num_draft_tokens: int, num_tokens: int, num_target_passes: int
    ) -> "SpeculationSummary":
        """The ratios from the counts; ``num_tokens`` were committed by ``num_target_passes`` passes."""
        steps = sum(histogram)
        accepted = sum(a * count for a, count in enumerate(histogram))
        return cls(
            method=method,
            num_spec_steps=steps,
            num_draft_tokens=num_draft_tokens,
            num_accepted_draft_tokens=accepted,
            draft_acceptance_rate=accepted / num_draft_tokens if num_draft_tokens else 0.0,
            mean_acceptance_length=1.0 + (accepted / steps if steps else 0.0),
            tokens_per_target_pass=num_tokens / num_target_passes if num_target_passes else 0.0,
            acceptance_histogram=tuple(histogram),
        )


@dataclasses.dataclass(frozen=True)
class Summary:
    """What the last chunk of a request carries."""

    usage: Usage
    timing: Timing
    speculation: SpeculationSummary
    seed: int  # the seed that was used, 0..2**64-1: giving it again repeats the request

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types under the keys ``usage``, ``timing``, ``speculation`` and ``seed``."""
        data = dataclasses.asdict(self)
        data["speculation"]["acceptance_histogram"] = list(self.speculation.acceptance_histogram)
        return data


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one step added to a request. The last chunk alone has ``finish_reason`` and ``summary``.

    ``text`` is what the tokens so far complete: whole characters only, with text that may begin a stop string held
    back, so that it can be empty while ``token_ids`` is not, and the other way round on the last chunk. Text past
    ``text_ends[-1]`` was held back and comes out at the end of the stream.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    origins: tuple[str, ...] = ()  # one of ORIGINS per token
    text_ends: tuple[int, ...] = ()  # per token: len(text) once it is in, so text[ends[i-1]:ends[i]] is token i's share
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token when asked for
    finish_reason: str | None = None  # one of FINISH_REASONS
    summary: Summary | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished stream, put together."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str
    summary: Summary

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> "Completion":
        """Joins all chunks of one request. ValueError when the last one is missing."""
        parts = list(chunks)
        if not parts or parts[-1].summary is None or parts[-1].finish_reason is None:
            raise ValueError(f"stream: expected a last chunk with finish reason and summary, got {len(parts)} chunks")
        last = parts[-1]
        asked = any(part.logprobs is not None for part in parts)
        return cls(
            request_id=last.request_id,
            text="".join(part.text for part in parts),
            token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
            origins=tuple(origin for part in parts for origin in part.origins),
            logprobs=tuple(entry for part in parts for entry in part.logprobs or ()) if asked else None,
            finish_reason=parts[-1].finish_reason,
            summary=parts[-1].summary,
        )

    def as_dict(self) -> dict[str, Any]:
        """The one JSON object that ``jaxspec generate --json`` and ``jaxspec-client --json`` print."""
        data: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            **self.summary.as_dict(),
        }
        if self.logprobs is not None:
            data["logprobs"] = [
                {
                    "token_id": entry.token_id,
                    "logprob": entry.logprob,
                    "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in entry.top],
                }
                for entry in self.logprobs
            ]
        return data


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What is served."""

    family: str
    model_version: str
    parameter_count: int
    vocab_size: int
    context_length: int  # tokens of prompt and completion together
    dtype: str
    tokenizer_fingerprint: str | None
    has_tokenizer: bool  # without one, requests give and get token ids only
    eos_token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """How it is served: fixed from start-up on."""

    version: str
    mesh: Mapping[str, int]  # axis name -> size
    device_kind: str
    max_slots: int
    max_len: int
    max_queue: int
    method: str
    rejection_sample_method: str
    num_speculative_tokens: int
    gamma_buckets: tuple[int, ...]
    deterministic: bool = False
    # The longest and shortest suffix looked up where a request does not say, tokens; None: nothing is looked up.
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None


@dataclasses.dataclass(frozen=True)
class Counters:
    """Totals since start-up."""

    num_drafts: int = 0  # speculative steps of single requests
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = (0,) * GAMMA_MAX  # [i]: how often draft i was accepted
    num_committed_tokens: int = 0
    num_target_passes: int = 0
    num_requests_finished: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by reason


@dataclasses.dataclass(frozen=True)
class Loads:
    """What the engine is doing now."""

    running: int
    waiting: int
    slots_free: int
    cache_tokens_used: int
    cache_tokens_total: int
    counters: Counters
