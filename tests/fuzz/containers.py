"""Changes to safetensors and GGUF files that know their structure: consistent but for the one thing that is wrong."""

import dataclasses
import json
import struct
from collections.abc import Iterator
from typing import Any

from tests.fuzz.jsons import mutate_json
from tests.fuzz.trees import Rng, mutate_bytes, overwrite


def mutate_safetensors(data: bytes, rng: Rng) -> tuple[bytes, str]:
    """The header's JSON, its entries, its length, or bytes of the head."""
    if len(data) < 8 or (size := int.from_bytes(data[:8], "little")) > len(data) - 8:
        return mutate_bytes(data, rng, [(0, 100)])
    header, body = data[8 : 8 + size], data[8 + size :]
    match rng.randrange(10):
        case 0:
            return overwrite(data, rng, 0, 8)
        case 1 | 2:
            return mutate_bytes(data, rng, [(0, 8), (8, 8 + size), (8 + size, len(data))])
        case 3 | 4 | 5:
            header, what = _mutate_entries(header, rng)
        case _:
            header, what = mutate_json(header, rng)
    return len(header).to_bytes(8, "little") + header + body, f"header: {what}"


def _mutate_entries(header: bytes, rng: Rng) -> tuple[bytes, str]:
    """What an entry claims: sizes of any kind, offsets that overlap, leave gaps or run backwards."""
    try:
        entries = json.loads(header)
        name = rng.choice(list(entries))
        entry = entries[name]
        begin, end = entry["data_offsets"]
        other = rng.choice(list(entries.values()))["data_offsets"]
        begin, end = int(begin), int(end)
        entry["shape"] = list(entry["shape"])
    except (ValueError, KeyError, TypeError, RecursionError, IndexError):  # a mutant of a mutant
        return mutate_json(header, rng)
    shapes = [
        [],
        [0],
        [0, 2**62],
        [2**62, 2**62, 2**62],
        [10**4_000, 10**4_000],
        [-1, *entry["shape"]],
        [1, *entry["shape"]],
        [*entry["shape"], 1],
        list(reversed(entry["shape"])),
        [1] * 100_000,
        [2] * 70,
        [True],
        [1.0],
        ["1"],
        [None],
    ]
    offsets = [
        other,
        [end, begin],
        [begin, end + 4],
        [begin + 4, end + 4],
        [-begin - 4, end],
        [2**63, 2**63 + end - begin],
        [begin],
        [begin, end, end],
        [begin, None],
        [float(begin), float(end)],
        [True, end],
        [10**4_000, 10**4_000],
    ]
    if rng.random() < 0.5:
        entry["shape"], what = (new := rng.choice(shapes)), f"{name}: shape {str(new[:4])[:60]}"
    else:
        entry["data_offsets"], what = (new := rng.choice(offsets)), f"{name}: data_offsets {str(new[0])[:60]}, .."
    return json.dumps(entries).encode(), what


@dataclasses.dataclass
class Gguf:
    """A GGUF file taken apart. Values of fields are their bytes."""

    version: int
    fields: list[tuple[bytes, int, bytes]]  # key, type, value
    infos: list[tuple[bytes, list[int], int, int]]  # name, dims, type, offset
    data: bytes
    alignment: int = 32


_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def parse_gguf(data: bytes) -> Gguf:
    """Of a file that is right; any exception when it is not."""
    position = 4

    def number(width: int) -> int:
        nonlocal position
        value = int.from_bytes(take(width), "little")
        return value

    def take(count: int) -> bytes:
        nonlocal position
        if count > len(data) - position:
            raise ValueError("short")
        position += count
        return data[position - count : position]

    def skip(kind: int) -> None:
        if kind == _STRING:
            take(number(8))
        elif kind == _ARRAY:
            inner, count = number(4), number(8)
            if inner in _WIDTHS:
                take(count * _WIDTHS[inner])
            else:
                for _ in range(count):
                    skip(inner)
        else:
            take(_WIDTHS[kind])

    version, n_infos, n_fields = number(4), number(8), number(8)
    fields = []
    for _ in range(n_fields):
        key, kind = take(number(8)), number(4)
        start = position
        skip(kind)
        fields.append((key, kind, data[start:position]))
    infos = []
    for _ in range(n_infos):
        name = take(number(8))
        infos.append((name, [number(8) for _ in range(number(4))], number(4), number(8)))
    return Gguf(version, fields, infos, data[-(-position // 32) * 32 :])


def encode_gguf(gguf: Gguf) -> tuple[bytes, list[tuple[int, int]]]:
    """The file, and where its integers are: (position, width)."""
    out, spots = bytearray(b"GGUF"), []

    def number(value: int, width: int) -> None:
        spots.append((len(out), width))
        out.extend(value.to_bytes(width, "little"))

    number(gguf.version, 4)
    number(len(gguf.infos), 8)
    number(len(gguf.fields), 8)
    for key, kind, value in gguf.fields:
        number(len(key), 8)
        out.extend(key)
        number(kind, 4)
        if kind == _ARRAY:
            spots += [(len(out), 4), (len(out) + 4, 8)]
        elif kind in _WIDTHS or kind == _STRING:
            spots.append((len(out), _WIDTHS.get(kind, 8)))
        out.extend(value)
    for name, dims, kind, offset in gguf.infos:
        number(len(name), 8)
        out.extend(name)
        number(len(dims), 4)
        for size in dims:
            number(size, 8)
        number(kind, 4)
        number(offset, 8)
    out.extend(bytes(-len(out) % gguf.alignment))
    return bytes(out) + gguf.data, spots


def _string(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def _array(kind: int, *values: bytes) -> bytes:
    return kind.to_bytes(4, "little") + len(values).to_bytes(8, "little") + b"".join(values)


# Values of every type: (type, bytes). Each is right in itself, and wrong for most keys.
GGUF_VALUES: tuple[tuple[int, bytes], ...] = (
    *((kind, value) for kind in (0, 1, 7) for value in (b"\0", b"\1", b"\xff")),
    *((kind, struct.pack("<I", value)) for kind in (4, 5) for value in (0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1)),
    *((kind, struct.pack("<Q", value)) for kind in (10, 11) for value in (0, 1, 2**32, 2**62, 2**63, 2**64 - 1)),
    *((6, struct.pack("<f", value)) for value in (0.0, -1.0, 1e-40, 3e38, float("nan"), float("inf"), -float("inf"))),
    *((12, struct.pack("<d", value)) for value in (0.0, -1.0, 5e-324, 1e308, float("nan"), float("inf"))),
    *(
        (_STRING, _string(text))
        for text in (b"", b"llama", b"gpt2", b"a\nb", b"\x1b[31m", b"\0", b"\xff", b"x" * 3_000)
    ),
    *((_STRING, _string(text)) for text in (b"linear", b"yarn", "\u202e😀".encode(), b"llama-bpe")),
    (_ARRAY, _array(4)),
    (_ARRAY, _array(_STRING)),
    (_ARRAY, _array(5, b"\0\0\0\0")),
    (_ARRAY, _array(4, *[b"\7\0\0\0"] * 3_000)),
    (_ARRAY, _array(6, b"\0\0\xc0\x7f")),
    (_ARRAY, _array(_STRING, _string(b"a"), _string(b"a"))),
    (_ARRAY, _array(_STRING, *[_string(b"a b")] * 2_000)),
    (_ARRAY, _array(_STRING, _string(b"\n" * 600))),
    (_ARRAY, _array(_ARRAY, _array(4, b"\0\0\0\0"))),
    (_ARRAY, _array(_ARRAY, _array(_ARRAY, _array(_ARRAY)))),
    (_ARRAY, _array(77, b"\0")),
    (77, b"\0"),
)


def mutate_gguf(data: bytes, rng: Rng) -> tuple[bytes, str]:
    """A field, a tensor's entry, an integer anywhere in the head, or bytes."""
    try:
        gguf = parse_gguf(data)
        head = encode_gguf(gguf)[1][-1][0] + 8
    except (ValueError, KeyError, IndexError):
        return mutate_bytes(data, rng, [(0, 500)])
    match rng.randrange(10):
        case 0 | 1:
            position, width = rng.choice(encode_gguf(gguf)[1])
            return overwrite(data, rng, position, width)
        case 2 | 3:
            return mutate_bytes(data, rng, [(0, 24), (24, head), (head - 600, head), (head, len(data))])
        case 4 | 5 | 6 if gguf.fields:
            what = _mutate_field(gguf, rng)
        case _ if gguf.infos:
            what = _mutate_info(gguf, rng)
        case _:
            return mutate_bytes(data, rng, [(0, 500)])
    return encode_gguf(gguf)[0], what


def _mutate_field(gguf: Gguf, rng: Rng) -> str:
    fields, at = gguf.fields, rng.randrange(len(gguf.fields))
    key, kind, value = fields[at]
    # Fields have few types: half of the time one that the tokenizer or the shape needs.
    match rng.randrange(8):
        case 0:
            del fields[at]
            return f"{key!r} removed"
        case 1:
            fields.insert(rng.randrange(len(fields)), (key, *rng.choice([(kind, value), rng.choice(GGUF_VALUES)])))
            return f"{key!r} twice"
        case 2:
            names = [name for name, _, _ in fields] + list(_unused_keys())
            fields[at] = (new := rng.choice(names), kind, value)
            return f"{key!r} renamed {new[:40]!r}"
        case 3:
            fields.append((new := rng.choice(list(_unused_keys())), *(chosen := rng.choice(GGUF_VALUES))))
            return f"{new[:40]!r} added as {chosen[0]} {chosen[1][:20]!r}"
        case 4:
            other = rng.randrange(len(fields))
            fields[at], fields[other] = (key, *fields[other][1:]), (fields[other][0], kind, value)
            return f"{key!r} and {fields[other][0]!r} exchanged"
        case _:
            fields[at] = (key, *(chosen := rng.choice(GGUF_VALUES)))
            return f"{key!r} to type {chosen[0]} {chosen[1][:20]!r}"


def _unused_keys() -> Iterator[bytes]:
    yield from (b"split.count", b"general.alignment", b"llama.expert_count", b"llama.rope.scaling.type", b"")
    yield from (b"llama.rope.scaling.factor", b"llama.rope.scale_linear", b"a\nb", b"\xff", b"k" * 5_000)
    yield from (b"tokenizer.chat_template", b"tokenizer.ggml.unknown_token_id", b"tokenizer.ggml.pre")


def _mutate_info(gguf: Gguf, rng: Rng) -> str:
    infos, at = gguf.infos, rng.randrange(len(gguf.infos))
    name, dims, kind, offset = infos[at]
    changed: Any
    match rng.randrange(9):
        case 0:
            del infos[at]
            return f"{name!r} removed"
        case 1:
            infos.insert(rng.randrange(len(infos)), infos[at])
            return f"{name!r} twice"
        case 2 | 3:
            sizes = [
                *(dims[::-1], [], [*dims, 1], [1, *dims], [0, *dims[1:]], [2**63, 2**63], [2**32] * 4, [2**62]),
                *([dims[0] + 1, *dims[1:]], [dims[0] * 2, *dims[1:]], [1] * 5, [1] * 300, [32, 2**59]),
            ]
            changed = (name, rng.choice(sizes), kind, offset)
        case 4 | 5:
            changed = (name, dims, rng.choice([*range(45), 2**31, 2**32 - 1]), offset)
        case 6 | 7:
            steps = [offset + 32, offset + 1, 0, infos[rng.randrange(len(infos))][3], 2**63, 2**64 - 32, len(gguf.data)]
            changed = (name, dims, kind, rng.choice(steps) % 2**64)
        case _:
            names = [info[0] for info in infos] + [b"", b"a\nb", b"\xff", b"n" * 5_000, b"rope_freqs.weight"]
            changed = (rng.choice(names), dims, kind, offset)
    infos[at] = changed
    return f"{name!r} to {changed[0][:30]!r} {changed[1][:5]} type {changed[2]} offset {changed[3]}"
