"""What an export may take the place of: an earlier export, and nothing else."""

import re
from pathlib import Path
from typing import Final

from checkpoints_convert.readers.hf import INDEX, SINGLE, TOKENIZER_FILES
from jaxspec.errors import UserError

_SHARD: Final = re.compile(r"model-\d+-of-\d+\.safetensors")
_KNOWN: Final = frozenset({"config.json", INDEX, *TOKENIZER_FILES})


def check_replaceable(dst: Path, *, force: bool) -> None:
    """Raises UserError unless a Hugging Face folder may be written to ``dst``.

    ``force`` replaces an empty folder, or one that holds config.json, weights, tokenizer files and nothing else: what a
    converter wrote can be written again, a user's notes among it cannot.
    """
    if not dst.exists() and not dst.is_symlink():
        return
    if not force:
        raise UserError(f"{dst}: exists already; give --force to replace it")
    if reason := _not_ours(dst):
        raise UserError(
            f"{dst}: exists and is not a folder that was converted to Hugging Face's format ({reason}); "
            "not replaced, even with --force"
        )


def _not_ours(dst: Path) -> str | None:
    if dst.is_symlink() or not dst.is_dir():
        return "a link" if dst.is_symlink() else "a file"
    entries = {entry.name: entry for entry in dst.iterdir()}
    if not entries:
        return None
    weights = {name for name in entries if name == SINGLE or _SHARD.fullmatch(name)}
    if "config.json" not in entries or not weights:
        return f"no config.json with {SINGLE}"
    others = sorted(name for name, entry in entries.items() if name not in _KNOWN | weights or not entry.is_file())
    if not others:
        return None
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"it also holds {', '.join(others[:3])}{more}"
