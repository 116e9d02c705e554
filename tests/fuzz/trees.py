"""A source as a tree of files in memory, and what can happen to a file: cut, flipped, exchanged, no file at all."""

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Rng = random.Random


class Special(NamedTuple):
    """Something else in the place of a file. ``text`` is what it points to, or its size."""

    kind: str  # "folder", "fifo", "socket", "link", "sparse"
    text: str = ""


Tree = dict[str, bytes | Special]

# Where integers in a file are cut and overwritten to: ends of every width, and just beyond.
INTERESTING = (0, 1, 2, 7, 8, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63)
INTERESTING += (2**64 - 1, 2**64 - 8)


def write_tree(folder: Path, tree: Tree) -> None:
    folder.mkdir()
    for name, content in tree.items():
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content.kind == "folder":
            path.mkdir()
        elif content.kind == "fifo":
            os.mkfifo(path)
        elif content.kind == "link":
            path.symlink_to(content.text)
        elif content.kind == "sparse":
            with path.open("wb") as file:
                file.truncate(int(content.text))
        else:
            _bind(path)


def _bind(path: Path) -> None:
    # From inside the folder: the name of a socket may have a hundred bytes alone.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def overwrite(data: bytes, rng: Rng, position: int, width: int) -> tuple[bytes, str]:
    """One integer of a file replaced by an interesting one, or by a neighbour of what was there."""
    old = int.from_bytes(data[position : position + width], "little")
    near = [old + 1, old - 1, old * 2, old ^ (1 << rng.randrange(8 * width)), len(data), len(data) - 1]
    new = rng.choice([rng.choice(INTERESTING), rng.choice(near)]) % (1 << 8 * width)
    changed = data[:position] + new.to_bytes(width, "little") + data[position + width :]
    return changed, f"the {width} bytes at {position} from {old} to {new}"


def mutate_bytes(data: bytes, rng: Rng, zones: list[tuple[int, int]]) -> tuple[bytes, str]:
    """Blind changes; the zones (begin, end) are where the file keeps its structure, and are hit most."""
    begin, end = rng.choice(zones) if rng.random() < 0.8 else (0, len(data))
    begin = max(0, min(begin, len(data) - 1))
    at = rng.randrange(begin, max(begin + 1, min(end, len(data))))
    count = rng.choice([1, 1, 2, 4, 8, rng.randrange(1, 200)])
    noise = rng.randbytes(count)
    match rng.randrange(10):
        case 0:
            return data[:at], f"cut at byte {at}"
        case 1:
            return data[:at] + data[at + count :], f"{count} bytes at {at} removed"
        case 2:
            return data[:at] + noise + data[at:], f"{count} random bytes inserted at {at}"
        case 3:
            return data + rng.choice([noise, bytes(count), data[-count:]]), f"{count} bytes appended"
        case 4:
            return data[:at] + noise + data[at + count :], f"{count} random bytes at {at}"
        case 5:
            return data[:at] + bytes(count) + data[at + count :], f"{count} zeros at {at}"
        case 6:
            return data[:at] + data[at : at + count] * 2 + data[at + count :], f"{count} bytes at {at} twice"
        case 7 if len(data) >= 8:
            width = rng.choice([1, 2, 4, 8])
            return overwrite(data, rng, min(at, len(data) - width), width)
        case _:
            flipped = bytearray(data)
            spots = [min(at + rng.randrange(16), len(data) - 1) for _ in range(rng.choice([1, 1, 2, 5]))]
            for spot in spots if data else ():
                flipped[spot] ^= 1 << rng.randrange(8)
            return bytes(flipped), f"bits flipped at {spots}"


def mutate_files(tree: Tree, rng: Rng, name: str) -> tuple[Tree, str]:
    """The file as a whole: gone, another's content, or no regular file."""
    content = tree[name]
    size = len(content) if isinstance(content, bytes) else 0
    others = [other for other in tree if other != name]
    specials = [
        Special("folder"),
        Special("fifo"),
        Special("fifo"),
        Special("socket"),
        Special("link", "/dev/zero"),
        Special("link", "/dev/full"),
        Special("link", "/proc/self/mem"),
        Special("link", name),
        Special("link", "nowhere"),
        Special("link", "."),
        *(Special("sparse", str(size)) for size in (0, 8, 1 << 20, 1 << 33, 1 << 42)),
    ]
    fresh: list[bytes | Special] = [
        b"",
        bytes(size),
        rng.randbytes(min(size, 4096)),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        b"<!DOCTYPE html><html></html>",
        b"{}",
        b"[]",
        b"null",
        *(rng.choice(specials) for _ in range(6)),
    ]
    pick = rng.randrange(len(fresh) + 3)
    if pick < len(fresh):
        new = fresh[pick]
        shown = new[:30] if isinstance(new, bytes) else new
        return tree | {name: new}, f"{name} replaced by {shown!r}"
    if pick == len(fresh):
        return {other: tree[other] for other in others}, f"{name} removed"
    if pick == len(fresh) + 1 and others:
        other = rng.choice(others)
        return tree | {name: tree[other], other: content}, f"{name} and {other} exchanged"
    renames: list[Callable[[str], str]] = [str.upper, lambda text: f"{text}.bak", lambda text: text.replace("0", "7")]
    renamed = rng.choice(renames)(name)
    return {other: tree[other] for other in others} | {renamed: content}, f"{name} renamed {renamed}"
