"""Opening foreign heads: which file, and which format by the names of its tensors."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from checkpoints_convert.findings import Findings
from checkpoints_convert.heads.names import D2T, METHODS, T2D, HeadsDialect
from checkpoints_convert.readers.base import SourceTensor
from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.jsonfile import read_object
from checkpoints_convert.readers.pth import read_pth
from checkpoints_convert.readers.safetensors import read_directory
from jaxspec.errors import UserError
from jaxspec.model.heads.config import Method

# Where weights are looked for in a folder. Both may be there, of the same content: the one that is no pickle is read.
WEIGHTS: Final = ("medusa_lm_head.safetensors", "model.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
CONFIG: Final = "config.json"

NAMES: Final[Mapping[Method, str]] = {"medusa": "Medusa", "eagle": "EAGLE-1", "eagle3": "EAGLE-3"}

# Any one of these is enough: nothing else has it. In this order, since EAGLE-3 has most names of EAGLE-1 too.
_EVIDENCE: Final[Mapping[HeadsDialect, str]] = {
    "medusa": r"\d+\.\d+\.linear\.(weight|bias)",
    "speculators-eagle": r"fusion_fc\.(weight|bias)|transformer\..+",
    "eagle3": r"midlayer\..+",
    "speculators-eagle3": rf"{D2T}|{T2D}|norm\.weight|layers\.0\.hidden_norm\.weight",
    "eagle": r"fc\.(weight|bias)|layers\.0\..+",
}


@dataclasses.dataclass(frozen=True)
class ForeignHeads:
    """A file of heads in a foreign format; no tensor is loaded yet."""

    weights: SourceFile
    files: Mapping[str, SourceFile]  # everything that goes into the conversion, by name
    tensors: Mapping[str, SourceTensor]
    raw: Mapping[str, Any]  # config.json; empty where there is none
    dialect: HeadsDialect

    def index(self, name: str) -> np.ndarray:
        """An index tensor, read apart from the forward pass over the file."""
        tensor = self.tensors[name]
        stored = np.dtype(np.uint8) if tensor.dtype == np.bool_ else tensor.dtype
        count = int(np.prod(tensor.shape, dtype=int)) * stored.itemsize
        raw = self.weights.peek(tensor.place[1], count, name).view(stored).reshape(tensor.shape)
        return raw != 0 if tensor.dtype == np.bool_ else raw


def open_foreign(path: Path, expected: Method | None) -> ForeignHeads:
    """Opens a folder of heads, or the file of weights itself with config.json beside it.

    ``expected``: the method that the caller takes them for. Raises ConversionError with everything that is wrong.
    """
    findings = Findings()
    weights = SourceFile(_weights(path))
    tensors: Mapping[str, SourceTensor] = {}
    with findings.collecting():
        tensors = read_directory(weights) if weights.path.suffix == ".safetensors" else read_pth(weights)
    config = weights.path.parent / CONFIG
    raw: Mapping[str, Any] = {}
    if config.is_file():
        with findings.collecting():
            raw = read_object(config)
    findings.raise_if_any()
    dialect = detect(tensors, weights.name)
    if expected is not None and METHODS[dialect] != expected:
        findings.add(
            f"{weights.name}: expected {NAMES[expected]} weights (--method {expected}), found "
            f"{NAMES[METHODS[dialect]]} (method {METHODS[dialect]}, by the names of its tensors)"
        )
    if not raw and dialect != "medusa":
        findings.add(f"{CONFIG}: expected in {config.parent}, found none")
    said = raw.get("speculators_model_type")
    if said is not None and (said != METHODS[dialect] or not dialect.startswith("speculators")):
        findings.add(f"{CONFIG}: speculators_model_type is {said!r}, {weights.name} holds {dialect} tensors")
    if said is None and dialect.startswith("speculators"):
        findings.add(f"{CONFIG}: speculators_model_type is missing, {weights.name} holds {dialect} tensors")
    findings.raise_if_any()
    files = {weights.name: weights} | ({CONFIG: SourceFile(config)} if config.is_file() else {})
    return ForeignHeads(weights, files, tensors, raw, dialect)


def detect(names: Collection[str], where: str) -> HeadsDialect:
    """The format of heads with tensors of these names. ``architectures`` is not asked: EAGLE-3's says Llama.

    Raises UserError when the names are those of no format.
    """
    for dialect, pattern in _EVIDENCE.items():
        if any(re.fullmatch(pattern, name) for name in names):
            return dialect
    if any(name.startswith("model.layers.") for name in names):
        raise UserError(f"{where}: expected heads, found a whole model (convert it with to-orbax)")
    some = ", ".join(sorted(names)[:3]) or "none"
    raise UserError(
        f"{where}: expected the tensors of Medusa (0.0.linear.weight), EAGLE-1 (fc.weight, layers.0...), EAGLE-3 "
        f"(midlayer..., d2t) or speculators heads, found {some}"
    )


def _weights(path: Path) -> Path:
    if path.is_file():
        if path.suffix not in (".safetensors", ".pt", ".bin", ".pth"):
            raise UserError(f"{path}: expected heads: a folder, or a file .safetensors, .pt or .bin")
        return path
    if not path.is_dir():
        raise UserError(f"{path}: expected heads, found nothing")
    for name in WEIGHTS:
        if (path / name).is_file():
            return path / name
    if (path / "model.safetensors.index.json").is_file():
        raise UserError(f"{path}: expected heads in one file, found shards with an index")
    raise UserError(f"{path}: expected heads: one of {', '.join(WEIGHTS)}, found none of them")
