"""Changes to JSON that keep it JSON, or nearly: types, numbers, names, keys twice, depth, encodings."""

import json
from typing import Any

from tests.fuzz.trees import Rng


class Raw(str):
    """JSON text that is written as it is."""


class Pairs(list):
    """An object as its pairs, so that a key can come twice."""


DEPTHS = (200, 900, 2_000, 100_000)
EVIL: tuple[Raw, ...] = (
    *map(Raw, ("null", "true", "false", "0", "-0", "1", "-1", "2", "1.5", "-0.0", "1e-400", "1e400", "-1e400")),
    *map(Raw, ("NaN", "Infinity", "-Infinity", str(2**31), str(2**63), str(2**64), str(-(2**63)), "1" + "0" * 30)),
    *(Raw("9" * digits) for digits in (309, 400, 4_000, 4_301, 100_000)),
    *map(Raw, ('""', '"x"', '"0"', '"1"', '"null"', '"../x"', '"/etc/passwd"', '"a\\nb"', '"\\u0000"', '"\\ud800"')),
    *map(
        Raw, ('"\\udc80"', '"\\u001b[31m"', '"\\u202e"', '"😀"', f'"{"long" * 3_000}"', "[]", "{}", "[null]", "[[1]]")
    ),
    *map(Raw, ('[{"a": [1]}]', "[1, 2]", '["a"]', "[-1]", "[true]", '{"a": {"b": null}}', "[" + "7," * 5_000 + "7]")),
    *(Raw("[" * depth + "]" * depth) for depth in DEPTHS),
    *(Raw('{"a":' * depth + "1" + "}" * depth) for depth in DEPTHS),
)
TYPES = ("F64", "F8_E4M3", "I64", "I32", "U8", "BOOL", "F16", "BF16", "F32", "f32", "")


def mutate_json(data: bytes, rng: Rng) -> tuple[bytes, str]:
    """One change to the text of a JSON file; ``data`` may be broken already."""
    if rng.random() < 0.1:
        return _mutate_text(data, rng)
    try:
        root = [json.loads(data, object_pairs_hook=Pairs)]
    except (ValueError, RecursionError):
        return _mutate_text(data, rng)
    what = mutate_value(root, rng)
    try:
        return dump(root[0]).encode("utf-8", "surrogatepass"), what
    except RecursionError:
        return _mutate_text(data, rng)


def mutate_value(root: list[Any], rng: Rng) -> str:
    """Changes something inside ``root[0]``, or it; says what."""
    sites = _sites(root)
    holder, index = rng.choice(sites)
    key, value = _at(holder, index)
    where = f"{key!r}"[:60]
    match rng.randrange(12):
        case 0 if isinstance(holder, Pairs):
            holder.append((key, rng.choice([value, rng.choice(EVIL)])))
            return f"{where} twice"
        case 1 if isinstance(holder, Pairs):
            other = rng.choice([pair[0] for pair in holder] + ["", "x", "a\nb", "\ud800", "k" * 5_000, "__metadata__"])
            holder[index] = (other, value)
            return f"{where} renamed {other[:40]!r}"
        case 2 if isinstance(holder, Pairs):
            holder.insert(rng.randrange(len(holder) + 1), (rng.choice(["x", "rope", "\x1b[0m"]), rng.choice(EVIL)))
            return "a key added"
        case 3 if holder is not root:
            del holder[index]
            return f"{where} removed"
        case 4:
            other, its = rng.choice(sites)
            swapped = _at(other, its)[1]
            if not (_holds(value, other) or _holds(swapped, holder)):
                _put(other, its, value)
                _put(holder, index, swapped)
            return f"{where} and {_at(other, its)[0]!r} exchanged"[:120]
        case 5:
            _put(holder, index, rng.choice([[value], Pairs([("a", value)]), [value, value]]))
            return f"{where} wrapped"
        case 6 | 7 if isinstance(value, int | float) and not isinstance(value, bool):
            numbers = [value + 1, value - 1, value * 2, -value, value + 0.5, value * 10**6, str(value), 2**63 - value]
            new = rng.choice(numbers)
        case 8 if isinstance(value, str):
            new = rng.choice([*TYPES, value + "\n", value.upper(), value[:-1], value * 2, f"../{value}", f"/{value}"])
        case _:
            new = rng.choice(EVIL)
    _put(holder, index, new)
    return f"{where} from {str(value)[:40]!r} to {str(new)[:40]!r}"


def dump(node: Any) -> str:
    """JSON text; what is Raw goes out as it is."""
    match node:
        case Raw():
            return str(node)
        case Pairs():
            return "{" + ", ".join(f"{dump(key)}: {dump(value)}" for key, value in node) + "}"
        case list():
            return "[" + ", ".join(map(dump, node)) + "]"
        case int() if abs(node) > 10**4_000:
            return "9" * 4_001
        case _:
            return json.dumps(node)


def _sites(root: list[Any]) -> list[tuple[list[Any], int]]:
    """Every place of a value: its container and the index in it."""
    found: list[tuple[list[Any], int]] = []
    waiting = [root]
    while waiting:
        holder = waiting.pop()
        for index in range(len(holder)):
            found.append((holder, index))
            value = _at(holder, index)[1]
            if isinstance(value, list):
                waiting.append(value)
    return found


def _at(holder: list[Any], index: int) -> tuple[Any, Any]:
    return holder[index] if isinstance(holder, Pairs) else (index, holder[index])


def _put(holder: list[Any], index: int, value: Any) -> None:
    holder[index] = (holder[index][0], value) if isinstance(holder, Pairs) else value


def _holds(value: Any, container: list[Any]) -> bool:
    """Whether the container is the value or lies inside it: exchanging would tie a knot."""
    if not isinstance(value, list):
        return False
    return value is container or any(_holds(_at(value, index)[1], container) for index in range(len(value)))


def _mutate_text(data: bytes, rng: Rng) -> tuple[bytes, str]:
    text = data.decode("utf-8", "replace")
    variants = {
        "a byte order mark": b"\xef\xbb\xbf" + data,
        "UTF-16": text.encode("utf-16"),
        "UTF-32": text.encode("utf-32"),
        "Latin-1 in it": data.replace(b'"', b'"\xe9', 1),
        "a NUL behind": data + b"\0",
        "a comma at the end": data[:-1] + b",}",
        "text behind": data + b" {}",
        "spaces around": b" \n\t" * 500 + data + b" " * 500,
        "single quotes": data.replace(b'"', b"'"),
        "in a list": b"[" + data + b"]",
        "deep in lists": b"[" * 990 + data + b"]" * 990,
        "never closed": b"[" * 100_000,
        "a comment": b"// hello\n" + data,
        "twice the same object": data[:-1] + b"," + data[1:],
    }
    what = rng.choice(list(variants))
    return variants[what], what
