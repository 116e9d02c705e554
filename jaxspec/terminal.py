"""A stream of chunks on a terminal: text as it comes, drafted tokens in colour, one line of counts at the end."""

import os
import sys
from collections.abc import Iterable
from typing import Final

from jaxspec.engine.records import Chunk, Summary

DRAFT_COLOUR, PLAIN_COLOUR = "\x1b[32m", "\x1b[0m"
# The model's text must not drive the terminal.
VISIBLE: Final = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"}


def wants_colour(choice: str) -> bool:
    """``auto``: on a terminal, unless NO_COLOR is set."""
    return choice == "always" or (choice == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def show(chunks: Iterable[Chunk], *, colour: bool) -> None:
    """Writes text as it comes (token ids where there is no tokenizer), then a line about it to standard error."""
    ids: list[int] = []
    has_text = False
    for chunk in chunks:
        ids.extend(chunk.token_ids)
        has_text = has_text or bool(chunk.text)
        sys.stdout.write(painted(chunk) if colour else chunk.text)
        sys.stdout.flush()
        if chunk.summary is not None:
            sys.stdout.write("\n" if has_text else f"{','.join(map(str, ids))}\n")
            sys.stdout.flush()
            sys.stderr.write(f"[{in_words(chunk.finish_reason or '', chunk.summary)}]\n")


def painted(chunk: Chunk) -> str:
    """The text with the shares of accepted drafts in colour."""
    parts, start = [], 0
    for end, origin in zip(chunk.text_ends, chunk.origins, strict=True):
        share = chunk.text[start:end].translate(VISIBLE)
        parts.append(f"{DRAFT_COLOUR}{share}{PLAIN_COLOUR}" if origin == "draft" and share else share)
        start = end
    parts.append(chunk.text[start:].translate(VISIBLE))
    return "".join(parts).replace(PLAIN_COLOUR + DRAFT_COLOUR, "")


def in_words(finish_reason: str, summary: Summary) -> str:
    """One line about a finished request."""
    usage, timing, drafts = summary.usage, summary.timing, summary.speculation
    words = f"{finish_reason}: {usage.completion_tokens} tokens after {usage.prompt_tokens}"
    if timing.tokens_per_s is not None:
        words += f", {timing.tokens_per_s:.1f} tokens/s"
    return (
        f"{words}, {drafts.tokens_per_target_pass:.2f} tokens per target pass, "
        f"{drafts.num_accepted_draft_tokens} of {drafts.num_draft_tokens} drafts accepted, seed {summary.seed}"
    )
