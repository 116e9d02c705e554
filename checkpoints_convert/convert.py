"""The conversion from end to end: open, check everything, then write."""

import dataclasses
import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from checkpoints_convert.engine import Dtype, Plan, filled_groups, make_plan
from checkpoints_convert.findings import Findings
from checkpoints_convert.progress import Reporter, Silent
from checkpoints_convert.readers import Format, Source, open_source
from checkpoints_convert.readers.hf import GENERATION, TOKENIZER_FILES
from checkpoints_convert.tokenizer_files import UNKNOWN_VERSION, CarriedTokenizer, carry_tokenizer
from jaxspec.checkpoint import FORMAT_VERSION, CheckpointWriter, Manifest, check_destination

_HASH_BYTES: Final = 4 << 20


@dataclasses.dataclass(frozen=True)
class Result:
    """What a conversion wrote."""

    path: Path
    manifest: Manifest


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    source_format: Format = "auto",
    dtype: Dtype = "keep",
    tokenizer: str | Path | None = None,
    force: bool = False,
    progress: Reporter | None = None,
) -> Result:
    """Converts the foreign checkpoint ``src`` to the checkpoint folder ``dst``.

    ``dtype``: what the weights are stored in; ``keep`` loses nothing. ``tokenizer``: a folder whose tokenizer replaces
    the source's. ``force``: replace an earlier checkpoint at ``dst``. Raises ConversionError listing everything that
    is wrong with the source and the destination; then, and on any other failure, nothing is left at ``dst``.
    """
    src, dst, report = Path(src), Path(dst), progress or Silent()
    override = None if tokenizer is None else Path(tokenizer)
    with tempfile.TemporaryDirectory(prefix="jaxspec-tokenizer-") as scratch:
        plan, carried = _check(src, dst, source_format, dtype, override, force, Path(scratch))
        with CheckpointWriter(dst, force=force) as writer:
            hashes = _hash_files(_files(plan.source, carried), report)
            with report.stage("converting", plan.nbytes) as advance:
                for group, leaves in filled_groups(plan):
                    writer.write_group(group, leaves)
                    advance(sum(array.nbytes for array in leaves.values()))
            manifest = _manifest(plan, hashes, carried, writer)
            with report.stage("syncing to disk", plan.nbytes):
                writer.finish(plan.source.config, manifest, carried.folder if carried else None)
    return Result(dst, manifest)


def _check(
    src: Path, dst: Path, source_format: Format, dtype: Dtype, override: Path | None, force: bool, scratch: Path
) -> tuple[Plan, CarriedTokenizer | None]:
    """Everything that can be found wrong before the first byte is written."""
    findings = Findings()
    with findings.collecting():
        check_destination(dst, force=force)
    if line := _entangled(src, dst):
        findings.add(line)
    plan: Plan | None = None
    carried: CarriedTokenizer | None = None
    with findings.collecting():
        source = open_source(src, source_format)
        with findings.collecting():
            plan = make_plan(source, dtype)
        with findings.collecting():
            carried = carry_tokenizer(source, override, scratch)
    findings.raise_if_any()
    assert plan is not None
    return plan, carried


def _entangled(src: Path, dst: Path) -> str | None:
    """Why the two paths cannot go together: replacing or filling one would touch the other."""
    source, destination = src.resolve(), dst.resolve()
    if source == destination:
        return f"{dst}: source and destination are the same"
    if source in destination.parents or destination in source.parents:
        return f"{dst}: expected source and destination apart, one lies inside the other ({src})"
    return None


def _files(source: Source, carried: CarriedTokenizer | None) -> dict[str, Path]:
    """Every file that the result depends on, by name. A tokenizer given apart stands in for the source's."""
    if carried is None or carried.replaces is None:
        return dict(source.files)
    replaced = set(TOKENIZER_FILES) - {GENERATION}
    kept = {name: path for name, path in source.files.items() if name not in replaced}
    return kept | dict(carried.replaces)


def _hash_files(files: Mapping[str, Path], report: Reporter) -> dict[str, str]:
    sizes = {name: path.stat().st_size for name, path in files.items()}
    hashes: dict[str, str] = {}
    with report.stage("hashing sources", sum(sizes.values())) as advance:
        for name, path in files.items():
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(_HASH_BYTES):
                    digest.update(block)
                    advance(len(block))
            hashes[name] = digest.hexdigest()
    return hashes


def _manifest(
    plan: Plan, hashes: dict[str, str], carried: CarriedTokenizer | None, writer: CheckpointWriter
) -> Manifest:
    dtypes = {np.dtype(leaf.dtype).name for leaf in plan.leaves.values()}
    return Manifest(
        format_version=FORMAT_VERSION,
        source_format=plan.source.dialect,
        sources=hashes,
        family="llama",
        model_version=carried.model_version if carried else UNKNOWN_VERSION,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        parameter_count=plan.parameter_count,
        tokenizer_fingerprint=carried.fingerprint if carried else None,
        tokenizer_size=carried.size if carried else None,
        tensors={name: writer.tensors[name] for name in plan.leaves},
    )
