"""From trained parameters to a folder that the engine loads: heads, or a draft model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import jax
import ml_dtypes
import numpy as np

from jaxspec.checkpoint import CheckpointWriter, Manifest
from jaxspec.checkpoint.manifest import FORMAT_VERSION, group_and_leaf, grouped
from jaxspec.model.heads.params import heads_param_specs
from jaxspec.model.params import ParamSpec, param_specs
from train_heads.draft import DraftObjective
from train_heads.eagle import Eagle3Objective
from train_heads.job import Job
from train_heads.objective import Params

SOURCE: Final = "jaxspec-train"


def on_host(params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Whole arrays on every process's host, whatever the mesh."""
    whole: dict[str, np.ndarray] = {}
    for name, value in params.items():
        mesh = value.sharding
        if isinstance(mesh, jax.sharding.NamedSharding) and not value.is_fully_addressable:
            everywhere = jax.sharding.NamedSharding(mesh.mesh, jax.sharding.PartitionSpec())
            value = jax.jit(lambda x: x, out_shardings=everywhere)(value)
            whole[name] = np.asarray(value.addressable_data(0))
        else:
            whole[name] = np.asarray(value)
    return whole


def export(job: Job, trained: Params, fixed: Params, dst: Path, dtype: str) -> Path:
    """Writes the checkpoint folder ``dst`` in ``dtype`` (float32 or bfloat16), in place of one that is there.

    Every process calls it, the first one writes. A draft model goes with the target's tokenizer; words that were
    learnt alone are listed, most frequent first, where ``draft_vocab_size`` finds them.
    """
    arrays = on_host({**trained, **fixed})
    if jax.process_index():
        return dst
    objective = job.objective
    if isinstance(objective, DraftObjective):
        config, specs = objective.draft.config, param_specs(objective.draft.config)
        tokenizer_dir = job.checkpoint.tokenizer_dir
    else:
        config = objective.heads.config  # pyright: ignore[reportAttributeAccessIssue]
        specs, tokenizer_dir = heads_param_specs(config), None
    stored = {name: _stored(arrays[name], dtype) for name in specs}
    dst.parent.mkdir(parents=True, exist_ok=True)
    with CheckpointWriter(dst, force=dst.exists()) as writer:
        for group, names in grouped(list(specs)).items():
            writer.write_group(group, {group_and_leaf(name)[1]: stored[name] for name in names})
        listed = not objective.words.whole and not isinstance(objective, Eagle3Objective)
        manifest = _manifest(job, specs, stored, writer)
        writer.finish(config, specs, manifest, tokenizer_dir, _word_list(job) if listed else None)
    return dst


def _stored(array: np.ndarray, dtype: str) -> np.ndarray:
    if not np.issubdtype(array.dtype, np.floating) and array.dtype != ml_dtypes.bfloat16:
        return array
    return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def _word_list(job: Job) -> str:
    """JSON, the most frequent first."""
    ids = np.array(job.objective.words.ids)
    order = ids[np.argsort(-job.corpus.counts_V[ids], kind="stable")]
    return json.dumps(order.tolist()) + "\n"


def _manifest(
    job: Job, specs: Mapping[str, ParamSpec], stored: Mapping[str, np.ndarray], writer: CheckpointWriter
) -> Manifest:
    target = job.checkpoint.manifest
    is_model = isinstance(job.objective, DraftObjective)
    dtypes = {array.dtype.name for array in stored.values() if array.dtype != np.int32}
    return Manifest(
        format_version=FORMAT_VERSION,
        source_format=SOURCE,
        sources={},
        family=target.family,
        model_version=target.model_version,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        parameter_count=sum(array.size for array in stored.values()),
        tokenizer_fingerprint=target.tokenizer_fingerprint,
        tokenizer_size=target.tokenizer_size if is_model else None,
        tensors={name: writer.tensors[name] for name in specs},
    )
