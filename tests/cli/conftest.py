"""``jaxspec`` run in this process, and the tiny models that it runs on."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec import cli


@dataclasses.dataclass(frozen=True)
class Done:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def jaxspec(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def run(*arguments: str | Path) -> Done:
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as stopped:  # the parser's own way out
            status = stopped.code if isinstance(stopped.code, int) else -1
        printed = capsys.readouterr()
        return Done(status, printed.out, printed.err)

    return run


@pytest.fixture(scope="session")
def tiny(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("tiny-llama3")


@pytest.fixture(scope="session")
def tiny_draft(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("tiny-draft")


@pytest.fixture(scope="session")
def without_tokenizer(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as if its source had had no tokenizer."""
    folder = tmp_path_factory.mktemp("ids_only") / "model"
    shutil.copytree(tiny, folder)
    shutil.rmtree(folder / "tokenizer")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"tokenizer_fingerprint": None, "tokenizer_size": None}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="session")
def goldens(shared: Path) -> dict[str, np.ndarray]:
    with np.load(shared / "fixtures" / "tiny-llama3" / "goldens.npz") as data:
        return dict(data)
