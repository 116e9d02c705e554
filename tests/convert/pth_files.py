"""Reading files of torch.save in tests: what is in one, or the line with which it is refused."""

import numpy as np
import pytest

from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.pth import read_pth
from jaxspec.errors import UserError

FLOATS = np.arange(24, dtype=np.float32)


def read(path):
    return read_pth(SourceFile(path))


def refusal(path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(UserError) as caught:
        read(path)
    line = str(caught.value)
    assert line.isprintable()
    assert path.name in line
    return line
