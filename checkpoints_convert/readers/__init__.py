"""Readers: one file per format, behind the protocol in ``base``."""

from pathlib import Path
from typing import Final, Literal, get_args

from checkpoints_convert.readers.base import Source, SourceTensor
from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.gguf import open_gguf
from checkpoints_convert.readers.hf import INDEX, SINGLE, open_hf
from checkpoints_convert.readers.meta import is_meta_folder, open_meta
from jaxspec.errors import UserError

Format = Literal["auto", "hf", "gguf", "meta"]
FORMATS: Final = get_args(Format)

__all__ = ["FORMATS", "Format", "Source", "SourceTensor", "open_source"]


def open_source(path: Path, source_format: Format) -> Source:
    """Opens a source. Raises ConversionError listing everything that is wrong with it."""
    if not path.exists():
        raise UserError(f"{path}: expected a checkpoint, found nothing")
    chosen = _detect(path) if source_format == "auto" else source_format
    if chosen == "gguf":
        if not path.is_file():
            raise UserError(f"{path}: expected a GGUF file, found a folder")
        return open_gguf(path)
    if not path.is_dir():
        kind = "Hugging Face" if chosen == "hf" else "Meta"
        raise UserError(f"{path}: expected a {kind} folder, found a file")
    return open_hf(path) if chosen == "hf" else open_meta(path)


def _detect(path: Path) -> Literal["hf", "gguf", "meta"]:
    if path.is_file():
        file = SourceFile(path)
        if path.suffix == ".gguf" or file.peek(0, min(4, file.size), "the magic").tobytes() == b"GGUF":
            return "gguf"
        hint = "; of Meta's format, name the folder that holds params.json" if path.suffix == ".pth" else ""
        raise UserError(f"{path}: expected a checkpoint folder or a GGUF file, found another kind of file{hint}")
    if not path.is_dir():
        raise UserError(f"{path}: expected a checkpoint folder or a GGUF file, found a device or a pipe")
    if any((path / name).exists() for name in ("config.json", INDEX, SINGLE)):
        return "hf"
    if is_meta_folder(path):
        return "meta"
    inside = sorted(entry.name for entry in path.iterdir() if entry.suffix == ".gguf")
    hint = f"; to convert one of the GGUF files in it, name the file ({', '.join(inside)})" if inside else ""
    raise UserError(f"{path}: expected a checkpoint, found neither config.json nor {SINGLE} nor params.json{hint}")
