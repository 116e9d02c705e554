"""Weights over several files: how large a file may be, and which tensor goes where."""

import re
from collections.abc import Mapping
from typing import Final

from jaxspec.errors import UserError

# Powers of ten as transformers counts them, and powers of two by their own names.
_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(text: str | int) -> int:
    """A number of bytes: ``5GB``, ``1.5GiB``, ``500MB`` or plain bytes. Raises UserError for anything else.

    >>> parse_size("5GB"), parse_size("1.5 GiB"), parse_size(1000)
    (5000000000, 1610612736, 1000)
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", str(text).strip(), re.ASCII)
    unit = _UNITS.get(found[2].upper()) if found else None
    size = int(float(found[1]) * unit) if found and unit else 0
    if size < 1:
        raise UserError(f"shard size: expected bytes, or a number with KB, MB, GB, KiB, MiB or GiB, got {str(text)!r}")
    return size


def split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Names of tensors by file, in the order given, each file filled as far as ``limit`` bytes of data allow.

    A tensor that is larger than the limit has a file to itself. One file is called model.safetensors, several
    model-00001-of-0000N.safetensors, and so on, as transformers calls them.
    """
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not files:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}
