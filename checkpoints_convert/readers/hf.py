"""A Hugging Face folder: config.json, safetensors (one file, or shards with an index), tokenizer files."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from checkpoints_convert.findings import Findings
from checkpoints_convert.names import Dialect, head_name
from checkpoints_convert.readers.base import SourceTensor
from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.hf_config import llama_config
from checkpoints_convert.readers.jsonfile import read_object
from checkpoints_convert.readers.safetensors import read_directory
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
GENERATION: Final = "generation_config.json"  # read for its end tokens too
MAX_TOKENIZER: Final = 64 << 20  # bytes of one file of it; Gemma's, the largest in use, has 33 MB
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION,
)


@dataclasses.dataclass(frozen=True)
class HfSource:
    """See :class:`checkpoints_convert.readers.base.Source`."""

    folder: Path
    config: LlamaConfig
    tensors: Mapping[str, SourceTensor]
    files: Mapping[str, SourceFile]
    dialect: Dialect = "hf"

    def write_tokenizer(self, dst: Path) -> bool:
        return copy_tokenizer(self.folder, dst)


def open_hf(folder: Path) -> HfSource:
    """Opens a folder. Raises ConversionError with everything that is missing or contradictory in it."""
    findings = Findings()
    weights: dict[str, SourceTensor] = {}
    shards: dict[str, SourceFile] = {}
    with findings.collecting():
        shards, weights = _read_weights(folder)
    weights_found = not findings.lines
    config: LlamaConfig | None = None
    generation: dict[str, Any] = {}
    with findings.collecting():
        if (folder / GENERATION).is_file():
            generation = read_object(folder / GENERATION)
    with findings.collecting():
        has_head = head_name("hf") in weights or not weights_found
        config = llama_config(read_object(folder / "config.json"), generation, has_head=has_head)
    findings.raise_if_any()
    assert config is not None
    names = ["config.json", *([INDEX] if (folder / INDEX).is_file() else [])]
    names += [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return HfSource(folder, config, weights, shards | {name: SourceFile(folder / name) for name in names})


def copy_tokenizer(folder: Path, dst: Path) -> bool:
    """Copies the tokenizer files of ``folder`` into ``dst``. False, and nothing copied, without a tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return False
    for name in TOKENIZER_FILES:
        path = folder / name
        if not path.is_file():
            continue
        if (size := path.stat().st_size) > MAX_TOKENIZER:
            raise UserError(f"{name}: {size} bytes: expected at most {MAX_TOKENIZER}")
        try:
            shutil.copyfile(path, dst / name)
        except OSError as error:
            raise UserError(f"{path}: cannot be copied ({error.strerror})") from None
    return True


def _read_weights(folder: Path) -> tuple[dict[str, SourceFile], dict[str, SourceTensor]]:
    """The weight files that count, and their tensors. An index decides alone; stray files are not read."""
    findings = Findings()
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            file = SourceFile(folder / SINGLE)
            return {SINGLE: file}, read_directory(file)
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        found = f"only {', '.join(others)}" if others else "none"
        findings.add(f"expected {SINGLE}, or shards with {INDEX}, in {folder}, found {found}")
        findings.raise_if_any()
    expected = _read_index(folder)
    files: dict[str, SourceFile] = {}
    weights: dict[str, SourceTensor] = {}
    for shard, names in expected.items():
        if not (folder / shard).is_file():
            findings.add(f"{shard}: listed in {INDEX}, not in the folder")
            continue
        with findings.collecting():
            files[shard] = SourceFile(folder / shard)
            directory = read_directory(files[shard])
            for name in sorted(names - set(directory)):
                findings.add(f"{name}: {INDEX} says it is in {shard}, it is not")
            for name in sorted(set(directory) - names):
                owner = next((other for other, its in expected.items() if name in its), None)
                findings.add(
                    f"{name}: in {shard}, which {INDEX} does not say"
                    if owner is None
                    else f"{name}: duplicate: in {shard}, and by {INDEX} in {owner}"
                )
            weights |= directory
    findings.raise_if_any()
    return files, weights


def _is_file_name(text: str) -> bool:
    """Whether it can only be a file of the folder it is looked up in, and be written into a message and a manifest."""
    return (
        text not in ("", ".", "..") and not set(text) & set("/\\") and text.isprintable() and len(text.encode()) < 256
    )


def _read_index(folder: Path) -> dict[str, set[str]]:
    """Names of the tensors by shard. A shard outside the folder is refused."""
    findings = Findings()
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        findings.add(f"{INDEX}: expected a weight_map from tensor names to files, got {str(weight_map)[:80]}")
        findings.raise_if_any()
        raise AssertionError("unreachable")
    expected: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_file_name(shard):
            findings.add(f"{INDEX}: {name}: expected the name of a file in the same folder, got {shard!r}")
        else:
            expected.setdefault(shard, set()).add(name)
    findings.raise_if_any()
    return dict(sorted(expected.items()))
