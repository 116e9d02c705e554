"""Source and destination as places on a disk: apart from each other, and with room for what will be written."""

import os
import shutil
from pathlib import Path
from typing import Final

from jaxspec.staging import reclaimable_bytes

# Headers, manifest, tokenizer and what the file system rounds up, besides the weights.
SMALL_FILES: Final = 32 << 20


def entangled(src: Path, dst: Path) -> str | None:
    """Why the two paths cannot go together: replacing or filling one would touch the other."""
    # Not Path.resolve, which raises on a link that leads to itself.
    source, destination = Path(os.path.realpath(src)), Path(os.path.realpath(dst))
    if source == destination:
        return f"{dst}: source and destination are the same"
    if source in destination.parents or destination in source.parents:
        return f"{dst}: expected source and destination apart, one lies inside the other ({src})"
    return None


def disk_free(dst: Path) -> int:
    """Bytes free where ``dst`` will be, counting what killed runs left there: the next one takes it up or clears it."""
    place = Path(os.path.realpath(dst))
    while not place.is_dir():
        place = place.parent
    return shutil.disk_usage(place).free + reclaimable_bytes(dst)


def too_small(dst: Path, needed: int) -> str | None:
    """Why ``needed`` bytes will not fit."""
    free = disk_free(dst)
    return f"{dst}: needs {needed:,} bytes, {free:,} are free on its disk" if needed > free else None
