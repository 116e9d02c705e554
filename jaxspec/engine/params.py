"""What a request may ask for and what a server is started with: frozen records, each range stated and checked here.

Request records (``Prompt``, ``SamplingParams``, ``SpeculationParams``) are checked by ``validate()``, which raises
InvalidRequest naming field, value and range. Limits that need the model are arguments of ``validate``.
"""

import dataclasses
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxspec.errors import InvalidRequest, UserError
from jaxspec.shapes import GAMMA_MAX, NODES_MAX, WINDOW_MAX

TEMPERATURE_MIN: Final = 1e-6  # below it logits / temperature leave float32; 0 itself means greedy
TEMPERATURE_MAX: Final = 100.0
STOPS_MAX: Final = 16
STOP_CHARACTERS_MAX: Final = 256
STOP_TOKEN_IDS_MAX: Final = 16
LOGPROBS_MAX: Final = 8
SEED_MAX: Final = 2**64 - 1
PROMPT_LOOKUP_MAX: Final = 16
DRAFT_VOCAB_MIN: Final = 65  # more than the stop ids of a row, so that banning all of them leaves an id to draft

HEADS_METHODS: Final = ("medusa", "eagle", "eagle3")
METHODS: Final = ("ngram", "draft_model", *HEADS_METHODS, "lookahead", "hybrid", "none")
REJECTION_SAMPLE_METHODS: Final = ("token", "block", "coupled")
DRAFT_SAMPLE_METHODS: Final = ("greedy", "probabilistic")

BEAM_SEARCH_KEYS: Final = frozenset({"num_beams", "beam_width", "beam_size", "use_beam_search", "best_of"})
BEAM_SEARCH_REASON: Final = (
    "1 or unset: beam search keeps the most probable texts, which is another law than sampling from the model, and the "
    "acceptance laws are exact for sampling and for greedy decoding alone"
)

_ROLE: Final = re.compile(r"[a-z][a-z_]{0,31}")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Exactly one of: plain text, token ids, or a chat as (role, content) messages.

    Text and chat content are ordinary text: spellings of special tokens in them never become control ids.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    chat: tuple[tuple[str, str], ...] | None = None

    @classmethod
    def of(cls, prompt: "Prompt | str | Sequence[int]") -> "Prompt":
        """A str is text, any other sequence is token ids."""
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            return cls(text=prompt)
        return cls(ids=tuple(prompt))

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises InvalidRequest: none or several forms, an empty prompt, text that is not Unicode, ids out of range."""
        given = [name for name in ("text", "ids", "chat") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest("prompt", given, "exactly one of prompt (text), prompt_ids and chat")
        if self.text is not None:
            _check_text("prompt", self.text)
            if not self.text:
                raise InvalidRequest("prompt", self.text, "at least 1 character")
        if self.ids is not None:
            if not self.ids:
                raise InvalidRequest("prompt_ids", list(self.ids), "at least 1 token id")
            _check_token_ids("prompt_ids", self.ids, vocab_size)
        if self.chat is not None:
            if not self.chat:
                raise InvalidRequest("chat", [], "at least 1 message")
            for index, (role, content) in enumerate(self.chat):
                if not (isinstance(role, str) and _ROLE.fullmatch(role)):
                    raise InvalidRequest(
                        f"chat[{index}].role", role, "1 to 32 lower-case letters or underscores, such as user"
                    )
                _check_text(f"chat[{index}].content", content)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when a request ends.

    Filters apply in the order temperature, top_k, top_p, min_p. The end-of-sequence tokens of the model stop a request
    unless ``ignore_eos``; nothing of a stop string or after it is returned.
    """

    max_tokens: int | None = None  # >= 1; None or more than fits: up to the context length, finish reason "length"
    min_tokens: int = 0  # 0..max_tokens; stop tokens are banned before it
    temperature: float = 1.0  # 0 (greedy) or 1e-6..100
    top_k: int = 0  # >= 0; 0: off
    top_p: float = 1.0  # (0, 1]; 1: off
    min_p: float = 0.0  # [0, 1]; 0: off
    seed: int | None = None  # 0..2**64-1; None: random, reported in Summary.seed
    stop: tuple[str, ...] = ()  # at most 16 strings of 1..256 characters
    stop_token_ids: tuple[int, ...] = ()  # at most 16, in addition to the end-of-sequence tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token, 0..8; None: no log-probabilities
    skip_special_tokens: bool = True

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises InvalidRequest naming the first field outside its range."""
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None, "an integer >= 1, or unset for the rest of the context")
        _check_int("min_tokens", self.min_tokens, 0, None, "an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        _check_number("temperature", self.temperature)
        if self.temperature != 0 and not TEMPERATURE_MIN <= self.temperature <= TEMPERATURE_MAX:
            raise InvalidRequest(
                "temperature", self.temperature, f"0 (greedy) or a number in [{TEMPERATURE_MIN:g}, {TEMPERATURE_MAX:g}]"
            )
        _check_int("top_k", self.top_k, 0, None, "an integer >= 0 (0 turns top-k off)")
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise InvalidRequest("top_p", self.top_p, "a number in (0, 1] (1 turns top-p off)")
        _check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise InvalidRequest("min_p", self.min_p, "a number in [0, 1] (0 turns min-p off)")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, SEED_MAX, "an integer in [0, 2**64 - 1], or unset for a random one")
        self._validate_stops(vocab_size)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, LOGPROBS_MAX, f"an integer in [0, {LOGPROBS_MAX}], or unset")

    def _validate_stops(self, vocab_size: int | None) -> None:
        if isinstance(self.stop, str):
            raise InvalidRequest("stop", self.stop, "a list of strings")
        if len(self.stop) > STOPS_MAX:
            raise InvalidRequest("stop", f"{len(self.stop)} strings", f"at most {STOPS_MAX} strings")
        for index, stop in enumerate(self.stop):
            _check_text(f"stop[{index}]", stop)
            if not 1 <= len(stop) <= STOP_CHARACTERS_MAX:
                raise InvalidRequest(f"stop[{index}]", stop, f"1 to {STOP_CHARACTERS_MAX} characters")
        if len(self.stop_token_ids) > STOP_TOKEN_IDS_MAX:
            raise InvalidRequest(
                "stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {STOP_TOKEN_IDS_MAX} token ids"
            )
        _check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)


@dataclasses.dataclass(frozen=True)
class SpeculationParams:
    """What one request may change about speculation."""

    num_speculative_tokens: int | None = None  # drafted tokens per step, 0..8; 0: plain decoding; None: the server's
    # Longest and shortest suffix that is looked up (ngram, hybrid; other methods look nothing up), tokens.
    prompt_lookup_max: int | None = None  # 1..the server's; None: the server's
    prompt_lookup_min: int | None = None  # 1..prompt_lookup_max; None: the server's, or prompt_lookup_max if less

    def lookup(self, server: "SpeculationConfig") -> tuple[int, int]:
        """(shortest, longest) for this request. Raises InvalidRequest for lengths beyond the server's longest."""
        longest = server.prompt_lookup_max if self.prompt_lookup_max is None else self.prompt_lookup_max
        if longest > server.prompt_lookup_max:
            expected = f"at most the server's prompt_lookup_max={server.prompt_lookup_max}"
            raise InvalidRequest("prompt_lookup_max", longest, expected)
        shortest = min(server.prompt_lookup_min, longest) if self.prompt_lookup_min is None else self.prompt_lookup_min
        if shortest > longest:
            raise InvalidRequest("prompt_lookup_min", shortest, f"at most prompt_lookup_max={longest}")
        return shortest, longest

    def validate(self) -> None:
        """Raises InvalidRequest naming the first field outside its range."""
        if self.num_speculative_tokens is not None:
            _check_int(
                "num_speculative_tokens",
                self.num_speculative_tokens,
                0,
                GAMMA_MAX,
                f"an integer in [0, {GAMMA_MAX}] (0 is plain decoding), or unset for the server's",
            )
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(self, name) is not None:
                expected = f"an integer in [1, {PROMPT_LOOKUP_MAX}], or unset for the server's"
                _check_int(name, getattr(self, name), 1, PROMPT_LOOKUP_MAX, expected)
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        if longest is not None and shortest is not None and shortest > longest:
            raise InvalidRequest("prompt_lookup_min", shortest, f"at most prompt_lookup_max={longest}")


@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """How a server speculates: fixed at start-up, because every option here changes what is compiled."""

    method: str = "ngram"  # one of METHODS
    num_speculative_tokens: int = GAMMA_MAX  # levels drafted per step when a request does not say, 0..8
    prompt_lookup_max: int = 8  # longest suffix that the ngram drafter looks up, tokens, 1..16
    prompt_lookup_min: int = 3  # shortest one, 1..prompt_lookup_max
    rejection_sample_method: str = "block"  # docs/laws.md says what each guarantees
    model: str | None = None  # folder of the draft checkpoint, or of the heads where ``heads`` is not given
    heads: str | None = None  # folder of converted speculative heads: medusa, eagle, eagle3
    # How many ids a draft model or heads may say, 65 to their vocabulary; None: those their folder lists, else all.
    # draft_vocab.py: which ones.
    draft_vocab_size: int | None = None
    # How a draft model or heads choose when sampling: greedy, the likeliest, or probabilistic, drawn from their law.
    # None: chains and medusa's trees are drawn, EAGLE's trees greedy (they can be nothing else).
    draft_sample_method: str | None = None
    tree_choices: Any = None  # medusa: a static tree, see jaxspec.speculate.tree.parse_tree_choices; None: a default
    tree_topk: int = 4  # eagle, eagle3: children per node of a dynamic tree, 1..63; 1: a chain, drawn when sampling
    tree_depth: int | None = None  # eagle, eagle3: levels of the tree, 1..8; None: 5, or fewer if fewer are drafted
    tree_nodes: int = 16  # eagle, eagle3: nodes of the tree, the pending token among them, 2..64
    lookahead_window: int = 6  # lookahead: W, columns of guesses; window * (ngram - 1) at most 128
    lookahead_ngram: int = 4  # lookahead: N, tokens of an n-gram, of which all but the first are drafted, 2..9
    lookahead_candidates: int = 4  # lookahead: G, n-grams tried in a step; candidates * (ngram - 1) at most 63

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        if self.rejection_sample_method not in REJECTION_SAMPLE_METHODS:
            raise UserError(
                f"rejection_sample_method: expected {', '.join(REJECTION_SAMPLE_METHODS)}, "
                f"got {self.rejection_sample_method!r}"
            )
        if self.draft_sample_method not in (None, *DRAFT_SAMPLE_METHODS):
            expected = " or ".join(DRAFT_SAMPLE_METHODS)
            raise UserError(f"draft_sample_method: expected {expected}, got {self.draft_sample_method!r}")
        _check_int("num_speculative_tokens", self.num_speculative_tokens, 0, GAMMA_MAX, f"an integer in 0..{GAMMA_MAX}")
        _check_int(
            "prompt_lookup_max", self.prompt_lookup_max, 1, PROMPT_LOOKUP_MAX, f"an integer in 1..{PROMPT_LOOKUP_MAX}"
        )
        _check_int(
            "prompt_lookup_min",
            self.prompt_lookup_min,
            1,
            self.prompt_lookup_max,
            f"an integer in 1..prompt_lookup_max={self.prompt_lookup_max}",
        )
        for name in ("model", "heads"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise UserError(f"{name}: expected the path of a checkpoint folder, got {getattr(self, name)!r}")
        if self.draft_vocab_size is not None:
            expected = f"an integer >= {DRAFT_VOCAB_MIN}, or unset for the draft's whole vocabulary"
            _check_int("draft_vocab_size", self.draft_vocab_size, DRAFT_VOCAB_MIN, None, expected)
        _check_int("tree_topk", self.tree_topk, 1, NODES_MAX - 1, f"an integer in 1..{NODES_MAX - 1} (1: a chain)")
        if self.tree_depth is not None:
            _check_int("tree_depth", self.tree_depth, 1, GAMMA_MAX, f"an integer in 1..{GAMMA_MAX}")
        _check_int("tree_nodes", self.tree_nodes, 2, NODES_MAX, f"an integer in 2..{NODES_MAX}")
        longest = GAMMA_MAX + 1
        _check_int("lookahead_ngram", self.lookahead_ngram, 2, longest, f"an integer in 2..{longest}")
        for name, nodes in (("lookahead_window", WINDOW_MAX), ("lookahead_candidates", NODES_MAX - 1)):
            most = nodes // (self.lookahead_ngram - 1)
            expected = f"an integer in 1..{most} (at most {nodes} tokens with lookahead_ngram={self.lookahead_ngram})"
            _check_int(name, getattr(self, name), 1, most, expected)

    @property
    def takes_draft(self) -> bool:
        """Whether the method uses a draft model."""
        return self.method == "draft_model" or (self.method == "hybrid" and self.heads is None)

    @property
    def takes_heads(self) -> bool:
        """Whether the method uses heads."""
        return self.method in HEADS_METHODS or (self.method == "hybrid" and self.heads is not None)

    @property
    def looks_up(self) -> bool:
        """Whether the method looks up suffixes of prompt and completion."""
        return self.method in ("ngram", "hybrid")

    @property
    def slots_per_step(self) -> int:
        """Cache slots that a step may need, at most."""
        if self.method == "lookahead":
            return max(GAMMA_MAX + 1, (self.lookahead_window + self.lookahead_candidates) * (self.lookahead_ngram - 1))
        return NODES_MAX if self.method in (*HEADS_METHODS, "hybrid") else GAMMA_MAX + 1

    @property
    def heads_folder(self) -> str | None:
        """Where the heads of a heads method are."""
        return self.heads if self.heads is not None else self.model

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> "SpeculationConfig":
        """The ``--speculative-config`` JSON object. Unknown keys raise UserError, all of them named."""
        if not isinstance(data, Mapping):
            raise UserError(f"speculative-config: expected a JSON object, got {type(data).__name__}")
        values = dict(data)
        for key in sorted(BEAM_SEARCH_KEYS & set(values)):
            refuse_beam_search(key, values.pop(key))
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(
                f"speculative-config: unknown key {', '.join(map(repr, unknown))}; expected {', '.join(sorted(known))}"
            )
        return cls(**values)


def refuse_beam_search(field: str, value: object) -> None:
    """Raises InvalidRequest with the reason unless ``value`` asks for one beam or none."""
    if value not in (None, False, 0, 1):
        raise InvalidRequest(field, value, BEAM_SEARCH_REASON)


def _check_int(field: str, value: object, low: int, high: int | None, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequest(field, value, expected)
    if int(value) < low or (high is not None and int(value) > high):
        raise InvalidRequest(field, value, expected)


def _check_number(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InvalidRequest(field, value, "a finite number")


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(field, value, "text")
    # Undecodable bytes reach Python as lone surrogates (command lines, JSON escapes); no tokenizer can take them.
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRequest(field, value, "valid Unicode text, without lone surrogates")


def _check_token_ids(field: str, ids: Sequence[object], vocab_size: int | None) -> None:
    expected = "a token id >= 0" if vocab_size is None else f"a token id in [0, {vocab_size - 1}]"
    high = None if vocab_size is None else vocab_size - 1
    for index, token_id in enumerate(ids):
        _check_int(f"{field}[{index}]", token_id, 0, high, expected)
