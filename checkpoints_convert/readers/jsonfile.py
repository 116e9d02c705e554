"""JSON objects of foreign files: duplicates and non-objects are the user's to know."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

from checkpoints_convert.readers.files import SourceFile
from jaxspec.errors import UserError

# Bounds of what is believed, far above any checkpoint's. Text becomes some thirty times its size in memory; values that
# are deeper, or numbers that are longer, could not even be shown in a message.
MAX_JSON: Final = 16 << 20  # bytes
_MAX_DEPTH: Final = 64
_MAX_DIGITS: Final = 40


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises UserError when it is missing, not JSON, not an object, or repeats a key."""
    if not path.exists():
        raise UserError(f"{path.name}: expected in {path.parent}, found none")
    file = SourceFile(path)
    if file.size > MAX_JSON:
        raise UserError(f"{path.name}: {file.size} bytes of JSON: expected at most {MAX_JSON}")
    try:
        text = file.peek(0, file.size, "the file").tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path.name}: expected UTF-8 text, got {error.reason} at byte {error.start}") from None
    return parse_object(text, path.name)


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in ``text``. Raises UserError as :func:`read_object` does."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise UserError(f"{where}: duplicate key {', '.join(twice)}")
        return found

    def integer(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise UserError(f"{where}: a number of {len(digits)} digits: expected at most {_MAX_DIGITS}")
        return int(digits)

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_int=integer)
    except RecursionError:
        raise UserError(f"{where}: expected JSON, got too deep a nesting") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: expected JSON, got {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(data).__name__}")
    if _depth(data) > _MAX_DEPTH:
        raise UserError(f"{where}: expected JSON, got too deep a nesting")
    return data


def _depth(value: Any) -> int:
    """How many lists and objects lie inside each other, counted up to one more than is allowed."""
    level, depth = [value], 0
    while level and depth <= _MAX_DEPTH:
        level = [
            inner
            for holder in level
            for inner in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(inner, dict | list)
        ]
        depth += 1
    return depth
