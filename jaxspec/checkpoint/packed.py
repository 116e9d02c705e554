"""A checkpoint whose weights are one safetensors file: small enough to ship with a repository.

The folder is that of any checkpoint, with ``weights.safetensors`` in the place of ``params/``. A draft may leave out
the ends that it shares with its target; the manifest names them.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import safetensors

from jaxspec.checkpoint.manifest import TensorRecord, tensor_sha256
from jaxspec.errors import UserError

WEIGHTS: Final = "weights.safetensors"
# What a draft may take from its target.
ENDS: Final = ("embed", "lm_head")


def is_packed(folder: Path) -> bool:
    """Whether the weights are in one file."""
    return (folder / WEIGHTS).is_file()


def read_packed(folder: Path, names: Iterable[str], records: Mapping[str, TensorRecord]) -> dict[str, np.ndarray]:
    """These tensors, each checked against the manifest to the last bit. UserError names what is missing or differs."""
    path = folder / WEIGHTS
    arrays: dict[str, np.ndarray] = {}
    try:
        with safetensors.safe_open(path, "np") as file:
            held = set(file.keys())
            for name in names:
                if name not in held:
                    raise UserError(f"{path}: expected a tensor {name}, found none")
                arrays[name] = file.get_tensor(name)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({str(error).partition(chr(10))[0]})") from error
    for name, array in arrays.items():
        record = records[name]
        if (array.dtype.name, array.shape) != (record.dtype, record.shape):
            raise UserError(
                f"{path}: {name}: the manifest says {record.dtype} {list(record.shape)}, "
                f"the file holds {array.dtype.name} {list(array.shape)}"
            )
        if tensor_sha256(array) != record.sha256:
            raise UserError(f"{path}: {name}: not the tensor of the manifest (its sha256 differs)")
    return arrays
