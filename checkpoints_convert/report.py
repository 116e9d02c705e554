"""What ``inspect`` and ``to-orbax --dry-run`` print."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from checkpoints_convert.convert import Conversion
from checkpoints_convert.engine import nbytes
from jaxspec.checkpoint import Checkpoint, open_any
from jaxspec.checkpoint.manifest import STORED_DTYPES

_WORST: Final = 5  # layers that inspect names


def inspect_lines(path: Path) -> Iterator[str]:
    """Config, manifest, every tensor, totals, and what quantising cost. Raises UserError where there is none."""
    checkpoint = open_any(path)
    yield f"config.json    {json.dumps(checkpoint.config.to_json())}"
    manifest = checkpoint.manifest.to_json()
    errors = manifest.pop("quantization_errors")
    del manifest["tensors"]
    for key, value in manifest.items():
        yield f"{key:<22} {json.dumps(value) if isinstance(value, dict) else value}"
    yield ""
    quantised = f" {'max error':>10} {'rms error':>10}" if errors else ""
    yield f"{'group':<12} {'tensor':<26} {'dtype':<9} {'shape':<22} {'bytes':>14}{quantised}"
    for group, names in checkpoint.groups().items():
        for name in names:
            record = checkpoint.manifest.tensors[name]
            shape = "x".join(map(str, record.shape))
            cost = f" {errors[name]['max_abs']:>10.3g} {errors[name]['relative_rms']:>10.2%}" if name in errors else ""
            yield f"{group:<12} {name:<26} {record.dtype:<9} {shape:<22} {record.nbytes:>14,}{cost}"
    yield ""
    for dtype, (tensors, values, size) in dtype_totals(checkpoint).items():
        yield f"total {dtype:<9} {tensors} tensors, {values:,} values, {size:,} bytes"
    if errors:
        yield "worst of int8: " + ", ".join(f"{name} {error:.2%}" for name, error in worst_quantised(checkpoint))


def worst_quantised(checkpoint: Checkpoint[Any]) -> list[tuple[str, float]]:
    """The parameters that int8 hurt most, by relative root-mean-square error, worst first."""
    errors = checkpoint.manifest.quantization_errors
    ranked = sorted(errors, key=lambda name: errors[name].relative_rms, reverse=True)
    return [(name, errors[name].relative_rms) for name in ranked[:_WORST]]


def dtype_totals(checkpoint: Checkpoint[Any]) -> dict[str, tuple[int, int, int]]:
    """Per stored dtype: tensors, values, bytes."""
    totals = {}
    for dtype in STORED_DTYPES:
        records = [record for record in checkpoint.manifest.tensors.values() if record.dtype == dtype]
        if records:
            size = sum(record.nbytes for record in records)
            totals[dtype] = (len(records), size // STORED_DTYPES[dtype].itemsize, size)
    return totals


def plan_lines(conversion: Conversion) -> Iterator[str]:
    """Every tensor that would be stored and what fills it, and the disk space that it takes."""
    plan = conversion.plan
    source_bytes = sum(file.size for file in plan.source.files.values())
    yield f"source  {plan.source.dialect}, {len(plan.source.files)} files, {source_bytes:,} bytes"
    yield f"config  {json.dumps(plan.source.config.to_json())}"
    yield f"{'tensor':<26} {'dtype':<9} {'shape':<22} {'bytes':>14}  from"
    for leaf in plan.leaves.values():
        sources = ", ".join(f"{slot.source} ({plan.source.tensors[slot.source].encoding})" for slot in leaf.slots)
        for name, (dtype, shape) in leaf.stored.items():
            size = nbytes(dtype, shape)
            yield f"{name:<26} {dtype.name:<9} {'x'.join(map(str, shape)):<22} {size:>14,}  {sources}"
    carried = conversion.carried
    tokenizer = "none: token ids only" if carried is None else f"{carried.size} tokens, {carried.fingerprint}"
    yield f"tokenizer  {tokenizer}"
    yield (
        f"{plan.parameter_count:,} parameters, {len(plan.stored)} tensors, {plan.nbytes:,} bytes; the disk needs "
        f"{conversion.disk_needed:,} bytes, {conversion.disk_free:,} are free; nothing was written"
    )
