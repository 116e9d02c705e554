"""What the conversion tests share: conversions in process, and conversions that must be refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoints_convert.cli import main
from jaxspec.checkpoint import open_checkpoint, read_group

Tree = dict[str, np.ndarray]


@pytest.fixture
def tree() -> Callable[[Path], Tree]:
    """``tree(folder)``: every stored tensor of a checkpoint, by name."""

    def read(folder: Path) -> Tree:
        checkpoint = open_checkpoint(folder)
        return {name: array for group in checkpoint.groups() for name, array in read_group(checkpoint, group).items()}

    return read


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """``refused(src, *options)``: converts by command line, expects status 2 and nothing left; gives the findings."""

    def run(src: Path, *options: str) -> list[str]:
        dst = tmp_path / "refused"
        assert not dst.exists()
        status = main(["to-orbax", str(src), str(dst), *options])
        printed = capsys.readouterr()
        assert status == 2, printed
        assert printed.out == ""
        assert not dst.exists()
        assert not list(tmp_path.glob(".*")), "a hidden sibling was left"
        lines = printed.err.splitlines()
        assert lines
        assert all(line.startswith("error: ") for line in lines), lines
        return [line.removeprefix("error: ") for line in lines]

    return run
