"""JSON objects of foreign files: duplicates and non-objects are the user's to know."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from jaxspec.errors import UserError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises UserError when it is missing, not JSON, not an object, or repeats a key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path.name}: expected in {path.parent}, found none") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path.name}: expected UTF-8 text, got {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"{path.name}: cannot be read ({error.strerror})") from None
    return parse_object(text, path.name)


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in ``text``. Raises UserError as :func:`read_object` does."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise UserError(f"{where}: duplicate key {', '.join(twice)}")
        return found

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise UserError(f"{where}: expected JSON, got too deep a nesting") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: expected JSON, got {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(data).__name__}")
    return data
