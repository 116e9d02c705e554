"""The checkpoint folder: what is in it, how it is opened, restored and written.

=====================  =========================================================================================
manifest.json          :class:`Manifest`; written last, so a folder without it is not a checkpoint
config.json            :class:`jaxspec.model.config.LlamaConfig`
params/<group>/        one Orbax item per group: ``embed`` (with the final norm and the head), ``layers.0``, ...
tokenizer/             tokenizer.json and its companions; absent when the source had none
=====================  =========================================================================================
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp

from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig, checked_fields
from jaxspec.model.params import param_specs
from jaxspec.staging import StagedFolder

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
STORED_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Plain, uncompressed arrays in pieces of 16 MiB: weights do not compress, and a device reads only its own pieces.
_CHUNK_BYTES: Final = 16 << 20


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """What the manifest knows of one stored tensor; ``sha256`` is over its little-endian C-order bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORED_DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Where a checkpoint comes from and what it holds."""

    format_version: int
    source_format: str
    sources: dict[str, str]  # file name -> sha256
    family: str
    model_version: str
    dtype: str  # that of every tensor, or "mixed"
    parameter_count: int
    tokenizer_fingerprint: str | None
    tokenizer_size: int | None
    tensors: dict[str, TensorRecord]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping that :meth:`from_json` takes back unchanged."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> "Manifest":
        """Reads :meth:`to_json`'s mapping. Another format version, unknown or missing keys raise UserError."""
        if isinstance(data, Mapping) and data.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
            raise UserError(f"{where}: expected format version {FORMAT_VERSION}, got {data['format_version']!r}")
        values = checked_fields(cls, data, where)
        if not isinstance(values["tensors"], Mapping):
            raise UserError(f"{where}: tensors: expected a JSON object, got {type(values['tensors']).__name__}")
        records: dict[str, TensorRecord] = {}
        for name, entry in values["tensors"].items():
            record = TensorRecord(**checked_fields(TensorRecord, entry, f"{where}: tensors.{name}"))
            if record.dtype not in STORED_DTYPES:
                raise UserError(f"{where}: {name}: expected dtype {' or '.join(STORED_DTYPES)}, got {record.dtype!r}")
            records[name] = dataclasses.replace(record, shape=tuple(record.shape))
        return cls(**{**values, "tensors": records})


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder; its weights are still on disk."""

    path: Path
    config: LlamaConfig
    manifest: Manifest
    tokenizer_dir: Path | None

    def groups(self) -> dict[str, list[str]]:
        """Names of the stored tensors by group, in checkpoint order."""
        return grouped(self.manifest.tensors)


def group_and_leaf(name: str) -> tuple[str, str]:
    """The Orbax item that holds a parameter, and the parameter's key inside it.

    >>> group_and_leaf("layers.3.qkv"), group_and_leaf("final_norm")
    (('layers.3', 'qkv'), ('embed', 'final_norm'))
    """
    group, _, leaf = name.rpartition(".")
    return group or "embed", leaf


def grouped(names: Mapping[str, Any] | Sequence[str]) -> dict[str, list[str]]:
    """Parameter names by group; groups and names keep the order in which they come."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_and_leaf(name)[0], []).append(name)
    return groups


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a converted checkpoint and checks that its parts agree. No weight is read.

    Raises UserError naming everything that is missing, unknown or contradictory.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: expected the folder of a converted checkpoint, found {_kind(path)}")
    if not (path / MANIFEST).is_file():
        raise UserError(f"{path}: expected a converted checkpoint, found no {MANIFEST} (make one with jaxspec-convert)")
    manifest = Manifest.from_json(_read_json(path / MANIFEST), f"{path / MANIFEST}")
    config = LlamaConfig.from_json(_read_json(path / "config.json"))
    problems = _contradictions(config, manifest)
    problems += [
        f"params/{group} is missing" for group in grouped(manifest.tensors) if not (path / "params" / group).is_dir()
    ]
    tokenizer_dir: Path | None = None
    if manifest.tokenizer_fingerprint is not None:
        tokenizer_dir = path / "tokenizer"
        if not (tokenizer_dir / "tokenizer.json").is_file():
            problems.append("tokenizer/tokenizer.json is missing")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    return Checkpoint(path, config, manifest, tokenizer_dir)


def restore_params(
    checkpoint: Checkpoint, shardings: Mapping[str, jax.sharding.Sharding], dtype: npt.DTypeLike | None
) -> dict[str, jax.Array]:
    """Reads every parameter straight into its sharding.

    ``dtype`` is what all parameters are cast to while they are read; None keeps each as it is stored. Raises UserError
    when ``shardings`` does not name exactly the parameters of the checkpoint, or when the stored data is not what the
    manifest says.
    """
    tensors = checkpoint.manifest.tensors
    problems = [f"{name} has no sharding" for name in tensors if name not in shardings]
    problems += [f"the checkpoint has no {name}" for name in shardings if name not in tensors]
    if problems:
        raise UserError(f"{checkpoint.path}: {'; '.join(problems)}")

    def restore_args(name: str) -> ocp.RestoreArgs:
        record = tensors[name]
        target = STORED_DTYPES[record.dtype] if dtype is None else np.dtype(dtype)
        return ocp.ArrayRestoreArgs(sharding=shardings[name], global_shape=record.shape, dtype=target)

    params: dict[str, jax.Array] = {}
    with _orbax() as orbax:
        for group, names in checkpoint.groups().items():
            params |= _restore_group(orbax, checkpoint, group, {name: restore_args(name) for name in names})
    return params


def read_group(checkpoint: Checkpoint, group: str) -> dict[str, np.ndarray]:
    """The tensors of one group as they are stored, on the host, by flat name."""
    arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in checkpoint.groups()[group]}
    with _orbax() as orbax:
        return _restore_group(orbax, checkpoint, group, arguments)


class CheckpointWriter:
    """Writes a checkpoint folder that appears complete at ``dst``, or not at all.

    ``with CheckpointWriter(dst, force=False) as writer:`` then :meth:`write_group` for every group, then
    :meth:`finish`. Leaving the block without finish removes everything. Raises UserError when ``dst`` is taken.
    """

    def __init__(self, dst: str | Path, *, force: bool) -> None:
        check_destination(dst, force=force)
        self._stage = StagedFolder(Path(dst))
        self.tensors: dict[str, TensorRecord] = {}

    def __enter__(self) -> Self:
        self._stage.create()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stage.discard()

    def write_group(self, group: str, leaves: Mapping[str, np.ndarray]) -> None:
        """Writes one Orbax item. ``leaves``: float32 or bfloat16 arrays by their key inside the group."""
        for leaf, array in leaves.items():
            name = leaf if group == "embed" else f"{group}.{leaf}"
            self.tensors[name] = TensorRecord(array.dtype.name, array.shape, tensor_sha256(array))
        arguments = ocp.args.PyTreeSave(
            dict(leaves), save_args={leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for leaf in leaves}
        )
        with _orbax() as orbax:
            orbax.save((self._stage.path / "params" / group).absolute(), args=arguments)

    def finish(self, config: LlamaConfig, manifest: Manifest, tokenizer_dir: Path | None) -> None:
        """Adds the remaining files and moves the folder into place."""
        if problems := _contradictions(config, manifest):
            raise ValueError(f"checkpoint is not complete: {'; '.join(problems)}")
        if tokenizer_dir is not None:
            self._stage.copy_files(tokenizer_dir, "tokenizer")
        self._stage.write_text("config.json", json.dumps(config.to_json(), indent=2) + "\n")
        self._stage.write_text(MANIFEST, json.dumps(manifest.to_json(), indent=1) + "\n")
        self._stage.publish()


def check_destination(dst: str | Path, *, force: bool) -> None:
    """Raises UserError unless a checkpoint may be written to ``dst``. ``force`` replaces checkpoints, nothing else."""
    dst = Path(dst)
    if not dst.exists() and not dst.is_symlink():
        return
    if not force:
        raise UserError(f"{dst}: exists already; give --force to replace it")
    if not dst.is_dir() or dst.is_symlink() or (any(dst.iterdir()) and not (dst / MANIFEST).is_file()):
        raise UserError(
            f"{dst}: exists and is not a checkpoint folder (no {MANIFEST}); not replaced, even with --force"
        )


def tensor_sha256(array: np.ndarray) -> str:
    """sha256 of the little-endian bytes of an array in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _restore_group(
    orbax: ocp.Checkpointer, checkpoint: Checkpoint, group: str, arguments: Mapping[str, ocp.RestoreArgs]
) -> dict[str, Any]:
    folder = (checkpoint.path / "params" / group).absolute()
    by_leaf = {group_and_leaf(name)[1]: argument for name, argument in arguments.items()}
    _check_stored(checkpoint, group, folder)
    try:
        restored = orbax.restore(folder, args=ocp.args.PyTreeRestore(item=by_leaf, restore_args=by_leaf))
    except Exception as error:  # Orbax lets every layer below it throw what it likes, bare Exception included
        reason = str(error).partition("\n")[0].partition(" See full")[0][:200]
        raise UserError(f"{folder}: cannot be read ({type(error).__name__}: {reason})") from error
    return {name: restored[group_and_leaf(name)[1]] for name in arguments}


def _check_stored(checkpoint: Checkpoint, group: str, folder: Path) -> None:
    """Compares what is on disk with the manifest, before Orbax is asked.

    A cast must be asked for, never happen by accident; and a read that fails midway leaves Orbax's others running.
    """
    problems: list[str] = []
    for name in checkpoint.groups()[group]:
        record, leaf = checkpoint.manifest.tensors[name], folder / group_and_leaf(name)[1]
        if not (leaf / "zarr.json").is_file():
            problems.append(f"{name} is missing from params/{group}")
            continue
        array = _read_json(leaf / "zarr.json")  # the header of a Zarr 3 array
        dtype, shape = array.get("data_type"), array.get("shape")
        # Stored without compression, so the pieces are at least as large as the tensor.
        present = sum(piece.stat().st_size for piece in leaf.glob("c/**/*") if piece.is_file())
        if (dtype, shape) != (record.dtype, list(record.shape)):
            problems.append(
                f"{name}: the manifest says {record.dtype} {list(record.shape)}, params/{group} holds {dtype} {shape}"
            )
        elif present < record.nbytes:
            problems.append(f"{name}: expected {record.nbytes} bytes in params/{group}, found {present}")
    if problems:
        raise UserError(f"{checkpoint.path}: {'; '.join(problems)}")


def _contradictions(config: LlamaConfig, manifest: Manifest) -> list[str]:
    specs = param_specs(config)
    problems = [f"the manifest lacks {name}" for name in specs if name not in manifest.tensors]
    problems += [
        f"the manifest names {name}, which the model has not" for name in manifest.tensors if name not in specs
    ]
    problems += [
        f"{name}: config.json implies shape {list(specs[name].shape)}, the manifest says {list(record.shape)}"
        for name, record in manifest.tensors.items()
        if name in specs and specs[name].shape != record.shape
    ]
    return problems


@contextlib.contextmanager
def _orbax() -> Iterator[ocp.Checkpointer]:
    # By default Orbax copies every host array before it writes it, for callers that go on changing theirs.
    handlers = (
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False,
        use_zarr3=True,
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(*handlers),
    )
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns, per item, that there are no OCDBT parts to merge
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            yield checkpointer
    finally:
        log.setLevel(level)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent}: expected a file {path.name}, found none") from None
    except ValueError as error:
        raise UserError(f"{path}: expected JSON, got {error}") from None


def _kind(path: Path) -> str:
    return "a file" if path.exists() else "nothing"
