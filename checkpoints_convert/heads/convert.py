"""Heads from end to end: open, check everything, then write."""

import dataclasses
import math
from pathlib import Path
from typing import Final, get_args

from checkpoints_convert.convert import leaf_of
from checkpoints_convert.engine import Dtype
from checkpoints_convert.findings import Findings
from checkpoints_convert.heads.configs import foreign_config
from checkpoints_convert.heads.fit import fitted
from checkpoints_convert.heads.plan import Heads, is_ours, ours, planned
from checkpoints_convert.heads.source import CONFIG, NAMES, open_foreign
from checkpoints_convert.heads.write import Export, To, check_foreign_destination, exported, write_export
from checkpoints_convert.places import SMALL_FILES, entangled, too_small
from checkpoints_convert.progress import Reporter, Silent
from checkpoints_convert.tokenizer_files import UNKNOWN_VERSION
from jaxspec.checkpoint import Checkpoint, CheckpointWriter, Manifest, check_destination, open_checkpoint, open_heads
from jaxspec.checkpoint.manifest import FORMAT_VERSION
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads.config import HeadsConfig, MedusaConfig, Method
from jaxspec.model.heads.params import INDEX_LEAVES, heads_param_specs

FORMATS: Final = get_args(To)
HEAD_METHODS: Final = get_args(Method)


@dataclasses.dataclass(frozen=True)
class HeadsResult:
    """What was written. ``notes``: what a user should know though nothing is wrong."""

    path: Path
    config: HeadsConfig
    source_format: str
    parameter_count: int
    fingerprint: str | None  # of the tokenizer that the heads are bound to
    notes: tuple[str, ...]


def convert_heads(
    src: str | Path,
    dst: str | Path,
    *,
    to: To = "orbax",
    method: Method | None = None,
    target: str | Path | None = None,
    dtype: Dtype = "keep",
    base: str | None = None,
    force: bool = False,
    progress: Reporter | None = None,
) -> HeadsResult:
    """Converts the heads ``src``, foreign or ours, to our folder or to a format of others.

    ``to``: the format of ``dst``. ``method``: what the caller takes the heads for. ``target``: the converted checkpoint
    that they must fit; its tokenizer's fingerprint is recorded. ``dtype``: what floating-point weights are stored in;
    ``keep`` loses nothing. ``base``: what Hugging Face calls the target, for config.json of other formats. ``force``:
    replace earlier heads of that format at ``dst``. Raises ConversionError listing everything that is wrong; then, and
    on any other failure, nothing is left at ``dst``.
    """
    src, dst, report = Path(src), Path(dst), progress or Silent()
    if to not in FORMATS:
        raise UserError(f"to: expected {', '.join(FORMATS)}, got {to!r}")
    heads, export, model = _checked(src, dst, to, method, None if target is None else Path(target), dtype, force)
    count = _parameter_count(heads)
    manifest = _manifest(heads, model, count)
    if export is None:
        _write_ours(heads, manifest, dst, force, report)
    else:
        with report.stage("writing heads", heads.nbytes):
            write_export(export, dst, base)
    config = heads.config if export is None else export.config
    return HeadsResult(dst, config, heads.source_format, count, manifest.tokenizer_fingerprint, heads.notes)


def _checked(
    src: Path, dst: Path, to: To, method: Method | None, target: Path | None, dtype: Dtype, force: bool
) -> tuple[Heads, Export | None, Checkpoint[LlamaConfig] | None]:
    """Everything that can be found wrong before the first byte is written. Raises ConversionError with all of it."""
    findings = Findings()
    with findings.collecting():
        if to == "orbax":
            check_destination(dst, force=force)
        else:
            check_foreign_destination(dst, to, force=force)
    if line := entangled(src, dst):
        findings.add(line)
    if target is not None and entangled(target, dst):
        findings.add(f"{dst}: expected a place apart from the target ({target})")
    model: Checkpoint[LlamaConfig] | None = None
    if target is not None:
        with findings.collecting():
            model = open_checkpoint(target)
    heads: Heads | None = None
    export: Export | None = None
    with findings.collecting():
        heads = open_heads_source(src, method, None if model is None else model.config.vocab_size, dtype)
    if heads is not None and model is not None:
        heads = fitted(heads, model, findings)
    if heads is not None and to != "orbax":
        with findings.collecting():
            export = exported(heads, to, model)
    if line := too_small(dst, 0 if heads is None else heads.nbytes + SMALL_FILES):
        findings.add(line)
    findings.raise_if_any()
    assert heads is not None
    return heads, export, model


def open_heads_source(src: Path, method: Method | None, target_vocab: int | None, dtype: Dtype) -> Heads:
    """Opens heads, foreign or ours, and maps every tensor. Raises ConversionError listing everything that is wrong."""
    if is_ours(src):
        checkpoint = open_heads(src)
        if method is not None and checkpoint.config.method != method:
            raise UserError(
                f"{src}: expected {NAMES[method]} heads (--method {method}), found {NAMES[checkpoint.config.method]} "
                f"(method {checkpoint.config.method})"
            )
        return ours(checkpoint, dtype)
    foreign = open_foreign(src, method)
    heads = planned(foreign, foreign_config(foreign, target_vocab), dtype)
    said = foreign.raw.get("medusa_num_heads")
    if isinstance(heads.config, MedusaConfig) and said is not None and said != heads.config.num_heads:
        note = f"{CONFIG} says {said} heads, {foreign.weights.name} has {heads.config.num_heads}: the file is right"
        return dataclasses.replace(heads, notes=(note,))
    return heads


def _parameter_count(heads: Heads) -> int:
    specs = heads_param_specs(heads.config)
    return sum(math.prod(spec.shape) for name, spec in specs.items() if name not in INDEX_LEAVES)


def _manifest(heads: Heads, target: Checkpoint[LlamaConfig] | None, count: int) -> Manifest:
    """Without a target what was recorded before stays; foreign heads then have no fingerprint."""
    bound = target.manifest if target is not None else heads.manifest
    dtypes = {dtype.name for name, dtype in heads.dtypes.items() if name not in INDEX_LEAVES}
    return Manifest(
        format_version=FORMAT_VERSION,
        source_format=heads.source_format,
        sources={},
        family="llama" if bound is None else bound.family,
        model_version=UNKNOWN_VERSION if bound is None else bound.model_version,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        parameter_count=count,
        tokenizer_fingerprint=None if bound is None else bound.tokenizer_fingerprint,
        tokenizer_size=None,
        tensors={},
    )


def _write_ours(heads: Heads, manifest: Manifest, dst: Path, force: bool, report: Reporter) -> None:
    with CheckpointWriter(dst, force=force) as writer:
        with report.stage("converting heads", heads.nbytes) as advance:
            for group, names in heads.groups().items():
                arrays = heads.fill(names)
                writer.write_group(group, {leaf_of(name): array for name, array in arrays.items()})
                advance(sum(array.nbytes for array in arrays.values()))
        specs = heads_param_specs(heads.config)
        sources = _hashes(heads, report)
        done = dataclasses.replace(manifest, sources=sources, tensors={name: writer.tensors[name] for name in specs})
        with report.stage("syncing to disk", heads.nbytes):
            writer.finish(heads.config, specs, done, None)


def _hashes(heads: Heads, report: Reporter) -> dict[str, str]:
    with report.stage("hashing the rest", sum(file.unread for file in heads.files.values())) as advance:
        return {name: file.sha256(advance) for name, file in heads.files.items()}
