"""Reading weights: straight into shardings for a model, or onto the host, group by group."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp

from jaxspec.checkpoint.folder import Checkpoint, read_json
from jaxspec.checkpoint.int8 import dequantize
from jaxspec.checkpoint.manifest import SCALE, STORED_DTYPES, TensorRecord, group_and_leaf
from jaxspec.checkpoint.orbax import orbax
from jaxspec.checkpoint.packed import is_packed, read_packed
from jaxspec.errors import UserError


def restore_params(
    checkpoint: Checkpoint[Any], shardings: Mapping[str, jax.sharding.Sharding], dtype: npt.DTypeLike | None
) -> dict[str, jax.Array]:
    """Reads every parameter that the folder has straight into its sharding; those it shares are not among them.

    ``dtype`` is what floating-point parameters are cast to while they are read; None keeps each as it is stored. int8
    parameters are multiplied out on the devices that hold them, to float32 for None. Raises UserError when
    ``shardings`` does not name exactly the parameters of the checkpoint, or when the stored data is not what the
    manifest says.
    """
    problems = [f"{name} has no sharding" for name in checkpoint.specs if name not in shardings]
    problems += [f"the checkpoint has no {name}" for name in shardings if name not in checkpoint.specs]
    if problems:
        raise UserError(f"{checkpoint.path}: {'; '.join(problems)}")
    tensors = checkpoint.manifest.tensors
    shardings = {name: value for name, value in shardings.items() if name not in checkpoint.manifest.shared}

    def restore_args(name: str) -> ocp.RestoreArgs:
        record, stored = tensors[name], STORED_DTYPES[tensors[name].dtype]
        sharding = shardings.get(name)
        if sharding is None:
            sharding = _scale_sharding(shardings[name.removesuffix(SCALE)], len(record.shape))
        keep = dtype is None or np.issubdtype(stored, np.integer) or name not in shardings
        return ocp.ArrayRestoreArgs(
            sharding=sharding, global_shape=record.shape, dtype=stored if keep else np.dtype(dtype)
        )

    params: dict[str, jax.Array] = {}
    with orbax() as checkpointer:
        for group, names in checkpoint.groups().items():
            restored = _restore_group(checkpointer, checkpoint, group, {name: restore_args(name) for name in names})
            for name in names:
                if name in shardings:
                    scale = restored.get(name + SCALE)
                    params[name] = (
                        restored[name]
                        if scale is None
                        else _multiply_out(restored[name], scale, np.dtype(np.float32 if dtype is None else dtype))
                    )
    return params


def read_group(checkpoint: Checkpoint[Any], group: str) -> dict[str, np.ndarray]:
    """The parameters of one group on the host, by flat name; those stored as int8 are multiplied out to float32."""
    stored = read_stored(checkpoint, group)
    return {
        name: dequantize(array, stored[name + SCALE]) if name + SCALE in stored else array
        for name, array in stored.items()
        if name in checkpoint.specs
    }


def read_stored(checkpoint: Checkpoint[Any], group: str) -> dict[str, np.ndarray]:
    """The tensors of one group as they are stored, scales of int8 parameters included."""
    arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in checkpoint.groups()[group]}
    with orbax() as checkpointer:
        return _restore_group(checkpointer, checkpoint, group, arguments)


def stored_problems(params: Path, group: str, tensors: Mapping[str, TensorRecord]) -> list[str]:
    """What is wrong on disk with the tensors of one group, by the files alone.

    Orbax is not asked: it would cast without a word, and a read of its that fails midway leaves the others running.
    """
    problems: list[str] = []
    for name, record in tensors.items():
        leaf = params / group / group_and_leaf(name)[1]
        if not (leaf / "zarr.json").is_file():
            problems.append(f"{name} is missing from params/{group}")
            continue
        array = read_json(leaf / "zarr.json")  # the header of a Zarr 3 array
        dtype, shape = array.get("data_type"), array.get("shape")
        # Stored without compression, so the pieces are at least as large as the tensor.
        present = sum(piece.stat().st_size for piece in leaf.glob("c/**/*") if piece.is_file())
        if (dtype, shape) != (record.dtype, list(record.shape)):
            problems.append(
                f"{name}: the manifest says {record.dtype} {list(record.shape)}, params/{group} holds {dtype} {shape}"
            )
        elif present < record.nbytes:
            problems.append(f"{name}: expected {record.nbytes} bytes in params/{group}, found {present}")
    return problems


def _restore_group(
    checkpointer: ocp.Checkpointer, checkpoint: Checkpoint[Any], group: str, arguments: Mapping[str, ocp.RestoreArgs]
) -> dict[str, Any]:
    if is_packed(checkpoint.path):
        arrays = read_packed(checkpoint.path, arguments, checkpoint.manifest.tensors)
        return {name: _placed(array, arguments[name]) for name, array in arrays.items()}
    folder = (checkpoint.path / "params" / group).absolute()
    by_leaf = {group_and_leaf(name)[1]: argument for name, argument in arguments.items()}
    tensors = {name: checkpoint.manifest.tensors[name] for name in arguments}
    if problems := stored_problems(checkpoint.path / "params", group, tensors):
        raise UserError(f"{checkpoint.path}: {'; '.join(problems)}")
    try:
        restored = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(item=by_leaf, restore_args=by_leaf))
    except Exception as error:  # Orbax lets every layer below it throw what it likes, bare Exception included
        reason = str(error).partition("\n")[0].partition(" See full")[0][:200]
        raise UserError(f"{folder}: cannot be read ({type(error).__name__}: {reason})") from error
    return {name: restored[group_and_leaf(name)[1]] for name in arguments}


def _placed(array: np.ndarray, argument: ocp.RestoreArgs) -> Any:
    """As Orbax would restore it."""
    if not isinstance(argument, ocp.ArrayRestoreArgs):
        return array
    array = array.astype(argument.dtype)
    assert isinstance(argument.sharding, jax.sharding.Sharding)
    return jax.make_array_from_callback(array.shape, argument.sharding, array.__getitem__)


def _scale_sharding(sharding: jax.sharding.Sharding, rank: int) -> jax.sharding.Sharding:
    """Where the scales of a parameter live: split as its out axes are, which lead."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[:rank]))
    return sharding


@partial(jax.jit, static_argnums=2)
def _multiply_out(values: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    return dequantize(values, scale).astype(dtype)
