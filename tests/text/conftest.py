"""Tokenizers that the text tests share: the tiny one from both kinds of file, and the demo model's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from hypothesis import configuration

from checkpoints_convert.tokenizer_gguf import tokenizer_from_gguf
from jaxspec.text import Tokenizer

configuration.set_hypothesis_home_dir(Path(__file__).resolve().parents[2] / ".cache" / "hypothesis")


@pytest.fixture(scope="session")
def tiny_dir(shared: Path) -> Path:
    return shared / "fixtures" / "tiny-llama3" / "hf"


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> Tokenizer:
    """Llama 3's pre-tokenizer and special tokens over 512 ids."""
    return Tokenizer.load(tiny_dir)


@pytest.fixture(scope="session")
def tiny_fields(shared: Path) -> dict[str, Any]:
    """The metadata of the GGUF file made from the same tokenizer."""
    reader = GGUFReader(shared / "fixtures" / "tiny-llama3" / "gguf" / "tiny-llama3-q8_0.gguf")
    return {key: field.contents() for key, field in reader.fields.items()}


@pytest.fixture(scope="session")
def tiny_from_gguf(tiny_fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("gguf") / "tokenizer"
    tokenizer_from_gguf(tiny_fields, folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def demo(demo_model: Path) -> Tokenizer:
    """SmolLM2's tokenizer, rebuilt from the metadata of a GGUF file."""
    return Tokenizer.load(demo_model / "tokenizer")


@pytest.fixture
def edited(tiny_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """``edited(**{file: change})``: a copy of the tiny tokenizer folder with parsed JSON files changed in place."""
    import json

    def make(files: dict[str, Callable[[Any], None]]) -> Path:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            value = json.loads((tiny_dir / name).read_text(encoding="utf-8"))
            if name in files:
                files[name](value)
            (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")
        return tmp_path

    return make
