"""How Orbax is asked to store things: plain Zarr 3 arrays, one folder per tensor."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp

# Plain, uncompressed arrays in pieces of 16 MiB: weights do not compress, and a device reads only its own pieces.
_CHUNK_BYTES: Final = 16 << 20


@contextlib.contextmanager
def orbax() -> Iterator[ocp.Checkpointer]:
    """A checkpointer for one item or several."""
    # By default Orbax copies every host array before it writes it, for callers that go on changing theirs.
    handlers = (
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    processes = _this_process_alone()
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False,
        use_zarr3=True,
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(*handlers),
        multiprocessing_options=processes,
    )
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns, per item, that there are no OCDBT parts to merge
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=processes) as checkpointer:
            yield checkpointer
    finally:
        log.setLevel(level)


def _this_process_alone() -> ocp.options.MultiprocessingOptions:
    """One process writes a folder, and each reads its own pieces: none waits for the others."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process{own}"
    )


def save_item(folder: Path, leaves: Mapping[str, Any]) -> None:
    """Writes one item: numpy arrays, or jax arrays, whose shards then lie in files of their own."""
    arguments = ocp.args.PyTreeSave(
        dict(leaves), save_args={leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for leaf in leaves}
    )
    with orbax() as checkpointer:
        checkpointer.save(folder.absolute(), args=arguments)
