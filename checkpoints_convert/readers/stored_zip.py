"""The directory of a zip file whose entries are stored as they are: all that ``torch.save`` writes.

Nothing is extracted and nothing decompressed: an entry is a range of bytes of the file. The directory is read here, not
by ``zipfile``, because that believes a directory of any length, and lets entries overlap or share a name.
"""

import itertools
import struct
from typing import Final, NamedTuple

from checkpoints_convert.readers.files import SourceFile
from jaxspec.errors import UserError

_END: Final = struct.Struct("<4s4H2LH")  # signature, disks (2), entries (2), directory size and offset, comment length
_LOCATOR: Final = struct.Struct("<4sLQL")  # signature, disk, offset of the end record, disks
_END_64: Final = struct.Struct("<4sQ2H2L4Q")  # signature, ..., entries (2), directory size and offset
_RECORD: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_MAX_COMMENT: Final = 0xFFFF
_UNKNOWN_16, _UNKNOWN_32 = 0xFFFF, 0xFFFFFFFF  # "look in the 64-bit record"
_ENCRYPTED, _STORED, _EXTRA_64 = 1, 0, 1

# Far above any checkpoint's (a 405B shard has some 1,200 entries), and small in memory.
_MAX_ENTRIES: Final = 65_536
_MAX_DIRECTORY: Final = 16 << 20


class Entry(NamedTuple):
    """Where the bytes of one stored file lie."""

    begin: int
    size: int


class _Directory(NamedTuple):
    entries: int
    size: int
    offset: int


class _Record(NamedTuple):
    name: str
    size: int
    offset: int  # of the local header


def shown(text: str) -> str:
    """A name out of a file, fit for one line of a message."""
    return text if text.isprintable() and len(text) <= 120 else ascii(text[:80])


def read_zip(file: SourceFile) -> dict[str, Entry]:
    """The entries of a zip file by name. Raises UserError at the first thing that is not as ``torch.save`` writes it:
    compression, encryption, entries that overlap, share a name, leave the archive's folder or end behind the file."""
    directory = _directory(file)
    found: dict[str, Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for record in _records(file, directory):
        if record.name in found:
            raise UserError(f"{file.name}: zip entry {shown(record.name)}: there are two of that name")
        found[record.name] = entry = _entry(file, record, directory.offset)
        spans.append((record.offset, entry.begin + entry.size, record.name))
    spans.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise UserError(f"{file.name}: zip entries {shown(name)} and {shown(other)} overlap")
    return found


def _directory(file: SourceFile) -> _Directory:
    """From the end record, and from its 64-bit companion where there is one."""
    tail_start = max(0, file.size - _END.size - _MAX_COMMENT)
    tail = file.peek(tail_start, file.size - tail_start, "the zip directory").tobytes()
    position = len(tail) - _END.size  # of the signature: the last one whose comment ends with the file
    while position >= 0 and (position := tail.rfind(b"PK\5\6", 0, position + 4)) >= 0:
        if position + _END.size + _END.unpack_from(tail, position)[-1] == len(tail):
            break
        position -= 1
    if position < 0:
        raise UserError(f"{file.name}: truncated, or no zip file: it has no zip directory at its end")
    end = tail_start + position
    _, disk, first_disk, here, entries, size, offset, _ = _END.unpack_from(tail, position)
    if (disk, first_disk) != (0, 0) and _UNKNOWN_16 not in (disk, first_disk):
        raise UserError(f"{file.name}: one of several zip volumes; join them first")
    if end >= _LOCATOR.size:
        signature, _, end_64, _ = _LOCATOR.unpack(file.peek(end - _LOCATOR.size, _LOCATOR.size, "zip").tobytes())
        if signature == b"PK\6\7":
            wide = _directory_64(file, end_64, end - _LOCATOR.size)
            for given, unknown, true in (
                (here, _UNKNOWN_16, wide.entries),
                (entries, _UNKNOWN_16, wide.entries),
                (size, _UNKNOWN_32, wide.size),
                (offset, _UNKNOWN_32, wide.offset),
            ):
                if given not in (unknown, true):
                    raise UserError(f"{file.name}: the 32-bit and 64-bit zip directories differ: {given} and {true}")
            here, (entries, size, offset), end = wide.entries, wide, end_64
    if here != entries:
        raise UserError(f"{file.name}: one of several zip volumes; join them first")
    if entries > _MAX_ENTRIES or size > _MAX_DIRECTORY:
        raise UserError(
            f"{file.name}: zip directory of {entries} entries in {size} bytes: "
            f"expected at most {_MAX_ENTRIES} in {_MAX_DIRECTORY}"
        )
    if offset + size > end:
        raise UserError(f"{file.name}: the zip directory needs {size} bytes at byte {offset}, but ends at byte {end}")
    return _Directory(entries, size, offset)


def _directory_64(file: SourceFile, position: int, limit: int) -> _Directory:
    if position + _END_64.size > limit:
        raise UserError(f"{file.name}: its 64-bit zip directory is said to end at byte {position}, outside the file")
    fields = _END_64.unpack(file.peek(position, _END_64.size, "the 64-bit zip directory").tobytes())
    signature, here, entries, size, offset = fields[0], *fields[-4:]
    if signature != b"PK\6\6" or here != entries:
        raise UserError(f"{file.name}: there is no 64-bit zip directory at byte {position}, where it is said to be")
    return _Directory(entries, size, offset)


def _records(file: SourceFile, directory: _Directory) -> list[_Record]:
    data = file.peek(directory.offset, directory.size, "the zip directory").tobytes()
    records, position = [], 0
    for number in range(directory.entries):
        if position + _RECORD.size > len(data) or data[position : position + 4] != b"PK\1\2":
            raise UserError(f"{file.name}: the zip directory has {directory.entries} entries, number {number} is none")
        fields = _RECORD.unpack_from(data, position)
        flags, method, packed, size = fields[3], fields[4], fields[8], fields[9]
        name_size, extra_size, comment_size, disk, offset = *fields[10:14], fields[16]
        position += _RECORD.size
        end = position + name_size + extra_size + comment_size
        if end > len(data):
            raise UserError(f"{file.name}: the zip directory ends inside entry number {number}")
        name = _name(file, data[position : position + name_size])
        extra = data[position + name_size : position + name_size + extra_size]
        size, packed, offset = _wide_sizes(file, name, extra, size, packed, offset)
        position = end
        if flags & _ENCRYPTED:
            raise UserError(f"{file.name}: zip entry {shown(name)} is encrypted")
        if method != _STORED or packed != size:
            raise UserError(
                f"{file.name}: zip entry {shown(name)} is compressed (method {method}, {packed} bytes for {size}); "
                "torch.save stores entries as they are"
            )
        if disk not in (0, _UNKNOWN_16):
            raise UserError(f"{file.name}: zip entry {shown(name)} lies in another zip volume")
        records.append(_Record(name, size, offset))
    return records


def _name(file: SourceFile, raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file.name}: zip entry {shown(ascii(raw))}: its name is not UTF-8") from None
    # Names are only looked up, never opened; but none that torch writes leaves its folder.
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
        raise UserError(f"{file.name}: zip entry {shown(name)}: expected a path inside the archive")
    return name


def _wide_sizes(file: SourceFile, name: str, extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Size, packed size and offset, with those that do not fit 32 bits taken from the extra field."""
    wanted = [value == _UNKNOWN_32 for value in (size, packed, offset)]
    if not any(wanted):
        return size, packed, offset
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        body = extra[position + 4 : position + 4 + length]
        position += 4 + length
        if kind == _EXTRA_64 and len(body) == length >= 8 * sum(wanted):
            wide = iter(struct.unpack_from(f"<{sum(wanted)}Q", body))
            size, packed, offset = (
                next(wide) if is_wide else value for is_wide, value in zip(wanted, (size, packed, offset), strict=True)
            )
            return size, packed, offset
    raise UserError(f"{file.name}: zip entry {shown(name)}: its 64-bit size is missing")


def _entry(file: SourceFile, record: _Record, limit: int) -> Entry:
    """The range of the data, which begins after a local header of its own length. Sizes are the directory's: torch
    writes them behind the data, not into the local header."""
    name = record.name.encode()
    if record.offset + _LOCAL.size + len(name) > limit:
        raise UserError(f"{file.name}: zip entry {shown(record.name)} begins at byte {record.offset}, outside the file")
    raw = file.peek(record.offset, _LOCAL.size + len(name), "a zip entry").tobytes()
    fields = _LOCAL.unpack_from(raw)
    if fields[0] != b"PK\3\4" or fields[9] != len(name) or raw[_LOCAL.size :] != name:
        raise UserError(
            f"{file.name}: zip entry {shown(record.name)}: expected its header at byte {record.offset}, found none"
        )
    if fields[2] & _ENCRYPTED or fields[3] != _STORED:
        raise UserError(f"{file.name}: zip entry {shown(record.name)}: its header and the directory disagree")
    begin = record.offset + _LOCAL.size + len(name) + fields[10]
    if begin + record.size > limit:
        raise UserError(
            f"{file.name}: zip entry {shown(record.name)} needs {record.size} bytes at byte {begin}, "
            f"the directory begins at byte {limit}"
        )
    return Entry(begin, record.size)
