"""The tokenizer that goes with a conversion: where it comes from, what it is, and whether it fits the model."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from checkpoints_convert.readers import Source
from checkpoints_convert.readers.hf import copy_tokenizer
from checkpoints_convert.tokenizer_gguf import PRE_TOKENIZERS
from jaxspec.errors import UserError
from jaxspec.text import Tokenizer

# Pre-tokenizer -> version of the model family. Draft and target must agree on it, besides the fingerprint.
_VERSIONS: Final = {"llama-bpe": "3", "smollm": "smollm2"}
UNKNOWN_VERSION: Final = "unknown"


@dataclasses.dataclass(frozen=True)
class CarriedTokenizer:
    """A tokenizer laid out in ``folder``, ready to be copied into the checkpoint."""

    folder: Path
    replaces: Mapping[str, Path] | None  # files of the folder it was taken from, when that is not the source
    fingerprint: str
    size: int
    model_version: str


def carry_tokenizer(source: Source, override: Path | None, folder: Path) -> CarriedTokenizer | None:
    """Lays the tokenizer out in the empty ``folder``: that of ``override``, else the source's; None if it has none.

    Raises UserError when it cannot be read or has more tokens than the model has embeddings.
    """
    if override is not None:
        if not copy_tokenizer(override, folder):
            raise UserError(f"--tokenizer {override}: expected a folder with tokenizer.json")
    elif not source.write_tokenizer(folder):
        return None
    try:
        tokenizer = Tokenizer.load(folder)
    except UserError as error:
        # The folder is a copy that is gone when the message is read: the file's name says enough.
        raise UserError(str(error).replace(f"{folder}/", "")) from None
    if tokenizer.size > source.config.vocab_size:
        raise UserError(
            f"tokenizer: expected at most {source.config.vocab_size} tokens (vocab_size), got {tokenizer.size}"
        )
    replaces = None if override is None else {file.name: override / file.name for file in folder.iterdir()}
    version = _model_version(folder / "tokenizer.json")
    return CarriedTokenizer(folder, replaces, tokenizer.fingerprint, tokenizer.size, version)


def _model_version(path: Path) -> str:
    steps = _steps(json.loads(path.read_text(encoding="utf-8")).get("pre_tokenizer"))
    for name, version in _VERSIONS.items():
        if steps == _steps(PRE_TOKENIZERS[name].pre_tokenizer):
            return version
    return UNKNOWN_VERSION


def _steps(pre_tokenizer: Any) -> list[Any]:
    """The steps of a pre-tokenizer without the keys that change offsets alone."""
    if not isinstance(pre_tokenizer, dict):
        return []
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
