"""Changes to files of ``torch.save`` (the zip, and the pickle in it) and to tiktoken's ``tokenizer.model``."""

import io
import pickletools
import struct
import zipfile
from typing import NamedTuple

from tests.fuzz.trees import Rng, mutate_bytes, overwrite

# (position in the record, width) of every integer.
_END_SPOTS = ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2))
_END_64_SPOTS = ((4, 8), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8))
_LOCATOR_SPOTS = ((4, 4), (8, 8), (16, 4))
_RECORD_SPOTS = ((6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (34, 2), (42, 4))
_LOCAL_SPOTS = ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2))

NAMES = ("../x", "/etc/passwd", "a\\b", "", "x" * 70_000, "a\nb", "\x1b[31m", "data.pkl", "archive/data.pkl")
NAMES += ("archive/../../x", "archive/constants.pkl", "archive/byteorder", "archive//data.pkl", "ü/data.pkl", "C:x")


def mutate_torch(data: bytes, rng: Rng) -> tuple[bytes, str, bool]:
    """The changed file, what was changed, and whether it must be refused whatever else is in it."""
    entries = _entries(data)
    if not entries:
        return *mutate_bytes(data, rng, [(0, 200), (len(data) - 200, len(data))]), False
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            return _mutate_pickle(entries, rng)
        case 4 | 5:
            position, width = rng.choice(_spots(data))
            return *overwrite(data, rng, position, width), False
        case 6 | 7:
            return *_rebuild(entries, rng), False
        case 8:
            return *_mutate_end(data, rng), False
        case _:
            pickle_at = data.find(b"\x80\x02")
            directory = data.rfind(b"PK\5\6")
            zones = [(0, 100), (pickle_at, pickle_at + 3_000), (directory - 2_000, len(data)), (directory, len(data))]
            return *mutate_bytes(data, rng, [zone for zone in zones if zone[0] >= 0] or [(0, 100)]), False


def _entries(data: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # whatever zipfile makes of a mutant
        return {}


def _zip(entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name or "?", data)
    return out.getvalue()


def _spots(data: bytes) -> list[tuple[int, int]]:
    """Every integer of the zip's own records. The end record counts as much as the entries together."""
    end = data.rfind(b"PK\5\6")
    found = [(end + at, width) for at, width in _END_SPOTS] * 8
    for signature, spots in ((b"PK\6\6", _END_64_SPOTS), (b"PK\6\7", _LOCATOR_SPOTS)):
        if (start := data.rfind(signature)) >= 0:
            found += [(start + at, width) for at, width in spots] * 8
    for signature, spots in ((b"PK\1\2", _RECORD_SPOTS), (b"PK\3\4", _LOCAL_SPOTS)):
        start = data.find(signature)
        while start >= 0:
            found += [(start + at, width) for at, width in spots]
            start = data.find(signature, start + 4)
    return [(position, width) for position, width in found if position + width <= len(data)]


def _rebuild(entries: dict[str, bytes], rng: Rng) -> tuple[bytes, str]:
    """A zip that is right in itself: entries renamed, gone, twice, compressed, grown, in another order."""
    import warnings

    pairs, name = list(entries.items()), rng.choice(list(entries))
    at = list(entries).index(name)
    content = entries[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's, of names that come twice
        match rng.randrange(9):
            case 0:
                pairs[at] = (new := rng.choice(NAMES)[:60_000], content)
                return _zip(pairs), f"entry {name} renamed {new[:30]!r}"
            case 1:
                del pairs[at]
                return _zip(pairs), f"entry {name} removed"
            case 2:
                pairs.append((name, rng.choice([content, b"", bytes(len(content))])))
                return _zip(pairs), f"entry {name} twice"
            case 3:
                return _zip(pairs, rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])), "compressed"
            case 4:
                pairs[at] = (name, rng.choice([b"", content[:-1], content + b"\0", bytes(len(content)), content * 2]))
                return _zip(pairs), f"entry {name} of another size"
            case 5:
                rng.shuffle(pairs)
                return _zip(pairs), "entries in another order"
            case 6:
                pairs.append((rng.choice(NAMES)[:60_000], rng.choice([b"", b"big", content])))
                return _zip(pairs), "an entry added"
            case 7:
                folder = rng.choice(["", "a/b", "..", "other"])
                return _zip([(f"{folder}/{key.partition('/')[2]}", value) for key, value in pairs]), f"in {folder!r}"
            case _:
                return _zip([(f"{i}/{key}", value) for i in range(2) for key, value in pairs]), "two archives in one"


def _mutate_end(data: bytes, rng: Rng) -> tuple[bytes, str]:
    """The end of the zip: comments, a second directory, 64-bit records."""
    end = data.rfind(b"PK\5\6")
    record = data[end : end + 22]
    if len(record) < 22:
        return data[:-1], "cut by one"
    size, offset = struct.unpack_from("<LL", record, 12)
    count = struct.unpack_from("<H", record, 10)[0]
    noise = rng.choice([rng.randbytes(50), b"PK\5\6" * 9, record, bytes(65_535), record * 3])
    wide = rng.choice([(count, count, size, offset), (2**63, 2**63, size, offset), (count, count, 2**64 - 1, 2**63)])
    wide = rng.choice([wide, (count, count, size, 2**64 - size), (count, count + 1, size, offset), (0, 0, 0, 0)])
    end_64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *wide)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, rng.choice([end, end, end + 1, 0, 2**64 - 1]), 1)
    unknown = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65_535, 65_535, 2**32 - 1, 2**32 - 1, 0)
    variants = {
        "a comment": data[: end + 20] + len(noise).to_bytes(2, "little") + noise,
        "bytes behind": data + noise,
        "the directory twice": data[:end] + data[offset : offset + size] + record,
        "two ends": data + record,
        "64-bit records": data[:end] + end_64 + locator + record,
        "64-bit records alone": data[:end] + end_64 + locator + unknown,
        "a 64-bit record without its locator": data[:end] + end_64 + unknown,
        "bytes before": noise + data,
        "no end": data[:end],
        "an end alone": record,
        "an end of nothing": b"PK\5\6" + bytes(18),
    }
    what = rng.choice(list(variants))
    return variants[what], what


class _Snippet(NamedTuple):
    code: bytes
    hostile: bool = False  # would run or reach something: must be refused


_SNIPPETS = (
    _Snippet(b"cos\nsystem\n\x8c\x10touch ../hostile\x85R0", hostile=True),
    _Snippet(b"cbuiltins\neval\n\x8c\x011\x85R0", hostile=True),
    _Snippet(b"\x8c\x02os\x8c\x06system\x93\x8c\x10touch ../hostile\x85R0", hostile=True),
    _Snippet(b"ctorch\nload\n0", hostile=True),
    _Snippet(b"(\x8c\x10touch ../hostileios\nsystem\n0", hostile=True),
    _Snippet(b"\x82\x010", hostile=True),
    _Snippet(b"K\x01Q0", hostile=True),
    _Snippet(b"N0"),
    _Snippet(b"N"),
    _Snippet(b"("),
    _Snippet(b"0"),
    _Snippet(b"2"),
    _Snippet(b"."),
    _Snippet(b"]\x94h\x00a0"),
    _Snippet(b"(" * 50_000),
    _Snippet(b")" + b"\x85" * 200_000 + b"0"),
    _Snippet(b"}" + b"]" * 100_000),
    _Snippet(b"X\xff\xff\xff\x7f"),
    _Snippet(b"\x8d" + b"\xff" * 8),
    _Snippet(b"\x8b\xff\xff\xff\x7f"),
    _Snippet(b"\x8a\xff" + b"\x7f" * 255 + b"0"),
    _Snippet(b"\x8e" + b"\xff" * 8),
    _Snippet(b"I1000000000000000000000000\n0"),
    _Snippet(b"L" + b"9" * 5_000 + b"L\n0"),
    _Snippet(b"S'" + b"a" * 1_000 + b"'\n0"),
    _Snippet(b"c" + b"a" * 1_000 + b"\nb\n0"),
    _Snippet(b"ca\x1b[31m\nb\xff\n0"),
    _Snippet(b"r\xff\xff\xff\xff"),
    _Snippet(b"j\xff\xff\xff\xff"),
    _Snippet(b"\x95" + b"\xff" * 8),
)
# What a value can be replaced by.
_VALUES = (
    b"N",
    b"\x88",
    b"\x89",
    b"K\x00",
    b"J\xff\xff\xff\xff",
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b")",
    b"}",
    b"]",
)
_VALUES += (
    b"G\x7f\xf8\0\0\0\0\0\0",
    b"\x8c\x00",
    b"\x8c\x01\n",
    b"\x8c\x02\x1b[",
    b"X\x02\0\0\0\xff\xff",
    b"K\x01\x85",
)
_VALUES += (b"\x8a\x08" + bytes(4) + b"\1\0\0\0", b"ctorch\nDoubleStorage\n", b"ctorch\nUntypedStorage\n", b"h\x00")
_TYPES = (b"ctorch\nDoubleStorage\n", b"ctorch\nHalfStorage\n", b"ctorch\nLongStorage\n", b"ctorch\nUntypedStorage\n")


def _mutate_pickle(entries: dict[str, bytes], rng: Rng) -> tuple[bytes, str, bool]:
    name = next((name for name in entries if name.endswith("data.pkl")), None)
    code = entries[name] if name else b""
    try:
        starts = [position for _, _, position in pickletools.genops(code)]
    except Exception:  # a mutant of a mutant
        starts = []
    if name is None or len(starts) < 3:
        return *_rebuild(entries, rng), False
    parts = [code[begin:end] for begin, end in zip(starts, [*starts[1:], len(code)], strict=True)]
    at, hostile = rng.randrange(1, len(parts) - 1), False
    old = parts[at]
    values = [i for i, part in enumerate(parts) if part[:1] in b"KMJ\x8aX\x8cN\x88\x89"]
    match rng.randrange(9):
        case 0:
            del parts[at]
            what = f"instruction {at} {old[:12]!r} removed"
        case 1:
            parts.insert(at, old)
            what = f"instruction {at} {old[:12]!r} twice"
        case 2:
            other = rng.randrange(1, len(parts) - 1)
            parts[at], parts[other] = parts[other], old
            what = f"instructions {at} and {other} exchanged"
        case 3 | 4:
            snippet = rng.choice(_SNIPPETS)
            parts.insert(at, snippet.code)
            hostile, what = snippet.hostile, f"{snippet.code[:30]!r} inserted before instruction {at}"
        case 5 | 6 | 7 if values:
            at = rng.choice(values)
            old, parts[at] = parts[at], rng.choice([*_VALUES, parts[rng.choice(values)]])
            what = f"value {at} from {old[:20]!r} to {parts[at][:20]!r}"
        case 8:
            globals_ = [i for i, part in enumerate(parts) if part[:1] == b"c"]
            if globals_:
                at = rng.choice(globals_)
                parts[at] = rng.choice([*_TYPES, b"cos\nsystem\n", b"ctorch._utils\n_rebuild_tensor_v3\n"])
                hostile = parts[at] == b"cos\nsystem\n"
            what = f"global {at} to {parts[at]!r}"
        case _:
            parts[at] = bytes([rng.randrange(256)]) + old[1:]
            what = f"instruction {at} from {old[:1]!r} to {parts[at][:1]!r}"
    return _zip([(key, b"".join(parts) if key == name else value) for key, value in entries.items()]), what, hostile


def mutate_ranks(data: bytes, rng: Rng) -> tuple[bytes, str]:
    """tokenizer.model: lines exchanged, gone, twice, with other ranks or no base64."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    token, _, rank = lines[at].partition(b" ")
    others = [
        token + b" " + bad
        for bad in (b"-1", b"", b"1e3", b"0x1", b"999999999", b"9" * 5_000, b"1 2", "٣".encode(), b"+1")
    ]
    others += [
        b" " + rank,
        b"* " + rank,
        token[:-1] + b" " + rank,
        token,
        b"QUJD" * 300 + b" " + rank,
        b"\xff\xfe 1",
        b"\0",
    ]
    match rng.randrange(8):
        case 0:
            del lines[at]
            what = f"line {at} removed"
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
            what = f"line {at} twice"
        case 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
            what = f"lines {at} and {other} exchanged"
        case 3:
            other = lines[rng.randrange(len(lines))]
            lines[at] = token + b" " + other.partition(b" ")[2]
            what = f"line {at} with the rank of another"
        case 4:
            kind = rng.randrange(4)
            ends = [data.replace(b"\n", b"\r\n"), b"\n<unk>" + data, b"\n" * 100_000, data * 3]
            return ends[kind], f"variant {kind} of the whole file"
        case 5 if len(lines) > 1:
            return mutate_bytes(data, rng, [(0, len(data))])
        case _:
            lines[at] = rng.choice(others)
            what = f"line {at} to {lines[at][:40]!r}"
    return b"\n".join(lines), what
