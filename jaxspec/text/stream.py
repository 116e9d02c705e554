"""What a stream may show: token ids become text as they come, and stop strings never leak.

Both classes hold back only what can still change: up to three bytes of an unfinished character, and the text that
can still grow into a stop string. Neither result depends on how the input was cut into pieces.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxspec.errors import InvalidRequest

# The heads of characters that more bytes can still complete (Unicode table 3-7). Python's incremental decoder would
# also wait on ED A0, the head of a surrogate, which nothing completes.
_UNFINISHED = re.compile(
    rb"(?:[\xc2-\xdf]"
    rb"|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3][\x80-\xbf]{0,2}|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
)


class TokenBytes(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def id_to_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Incremental decoding: all pushes and the flush together are ``tokenizer.decode`` of all ids."""

    def __init__(self, tokenizer: TokenBytes, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._held = b""

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete. Invalid bytes show as U+FFFD; an unfinished character waits."""
        to_bytes = self._tokenizer.id_to_bytes
        data = self._held + b"".join(to_bytes(token_id) for token_id in ids if token_id not in self._hidden)
        unfinished = _UNFINISHED.search(data, max(0, len(data) - 3))
        self._held = unfinished.group() if unfinished else b""
        return data.removesuffix(self._held).decode(errors="replace")

    def flush(self) -> str:
        """The end of the stream: an unfinished character shows as one U+FFFD, once."""
        rest, self._held = self._held, b""
        return rest.decode(errors="replace")


class StopMatcher:
    """Cuts a stream of text before the first stop string that completes.

    Of several that complete at the same character the longest (the earliest start) counts. The matcher is an
    Aho-Corasick automaton: one state per prefix of a stop string, so the depth of the current state is exactly the
    length of the text that can still become one, and the cost is linear in the text whatever the number of stops.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest for an empty stop string: it would match everywhere."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]  # length of the longest stop string that ends in this state
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise InvalidRequest(f"stop[{index}]", stop, "a non-empty string")
            self._add(stop)
        self._fallback = self._link()
        self._state = 0
        self._held = ""
        self.stopped = False

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][char]
        self._match[state] = len(stop)

    def _link(self) -> list[int]:
        """For every state, the state of its longest proper suffix; breadth first, so that it is known in time."""
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._match[state] = self._match[state] or self._match[fallback[state]]
            for char, child in self._next[state].items():
                suffix = fallback[state]
                while suffix and char not in self._next[suffix]:
                    suffix = fallback[suffix]
                fallback[child] = self._next[suffix].get(char, 0)
                queue.append(child)
        return fallback

    def push(self, text: str) -> str:
        """What may be shown now. Once ``stopped``, always empty."""
        if self.stopped:
            return ""
        text, new_from = self._held + text, len(self._held)
        state = self._state
        for index in range(new_from, len(text)):
            char = text[index]
            while state and char not in self._next[state]:
                state = self._fallback[state]
            state = self._next[state].get(char, 0)
            if self._match[state]:
                self.stopped, self._held = True, ""
                return text[: index + 1 - self._match[state]]
        self._state = state
        shown = len(text) - self._depth[state]
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The end of the stream: what was held back and became no stop string."""
        rest, self._held, self._state = self._held, "", 0
        return rest
