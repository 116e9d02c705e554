"""The conversion from end to end: open, check everything, then write."""

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from checkpoints_convert.engine import Dtype, Filled, Plan, fill_group, make_plan, nbytes
from checkpoints_convert.findings import Findings
from checkpoints_convert.places import SMALL_FILES, disk_free, entangled, too_small
from checkpoints_convert.progress import Reporter, Silent
from checkpoints_convert.readers import Format, Source, open_source
from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.hf import GENERATION, TOKENIZER_FILES
from checkpoints_convert.tokenizer_files import UNKNOWN_VERSION, CarriedTokenizer, carry_tokenizer
from jaxspec.checkpoint import CheckpointWriter, Manifest, QuantizationError, check_destination
from jaxspec.checkpoint.manifest import FORMAT_VERSION
from jaxspec.model.params import param_specs
from jaxspec.sharding import Sharding, make_sharding

Quantize = Literal["none", "int8"]
QUANTIZE: Final = ("none", "int8")


@dataclasses.dataclass(frozen=True)
class Options:
    """How to convert.

    ``dtype``: what floating-point weights are stored in; ``keep`` loses nothing. ``quantize``: ``int8`` stores every
    matrix as int8 with a scale per output channel. ``tokenizer``: a folder whose tokenizer replaces the source's.
    ``mesh``: a mesh (as for serving, e.g. ``model=4``) whose devices will each find their pieces in files of their own;
    it takes as many (virtual) devices here. ``force``: replace an earlier checkpoint at the destination.
    """

    source_format: Format = "auto"
    dtype: Dtype = "keep"
    quantize: Quantize = "none"
    tokenizer: str | Path | None = None
    mesh: str | Mapping[str, int] | None = None
    force: bool = False


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion that was checked from end to end; nothing of it is written yet."""

    plan: Plan
    carried: CarriedTokenizer | None
    sharding: Sharding | None
    disk_needed: int  # bytes
    disk_free: int


@dataclasses.dataclass(frozen=True)
class Result:
    """What a conversion wrote; ``resumed`` names the groups that an earlier, killed run had finished."""

    path: Path
    manifest: Manifest
    resumed: tuple[str, ...]


def convert(src: str | Path, dst: str | Path, *, progress: Reporter | None = None, **options: Any) -> Result:
    """Converts the foreign checkpoint ``src`` to the checkpoint folder ``dst``; ``options`` as in :class:`Options`.

    Raises ConversionError listing everything that is wrong with the source and the destination; then, and on any other
    failure, nothing is left at ``dst``. After a kill or KeyboardInterrupt the same call goes on where it stopped.
    """
    src, dst, report, chosen = Path(src), Path(dst), progress or Silent(), Options(**options)
    with checked(src, dst, chosen) as conversion:
        plan, carried = conversion.plan, conversion.carried
        errors: dict[str, QuantizationError] = {}
        key = _resume_key(conversion)
        with CheckpointWriter(dst, force=chosen.force, resume_key=key) as writer:
            resumed = tuple(writer.finished)
            with report.stage("converting", plan.nbytes) as advance:
                for group, names in plan.groups().items():
                    if group not in writer.finished:
                        _write(writer, group, fill_group(plan, names), conversion)
                    errors |= {name: QuantizationError(**error) for name, error in writer.finished[group].items()}
                    advance(sum(nbytes(*what) for name in names for what in plan.leaves[name].stored.values()))
            manifest = _manifest(conversion, _hashes(_files(plan.source, carried), report), errors, writer)
            with report.stage("syncing to disk", plan.nbytes):
                config = plan.source.config
                writer.finish(config, param_specs(config), manifest, carried.folder if carried else None)
    return Result(dst, manifest, resumed)


@contextmanager
def checked(src: Path, dst: Path, options: Options) -> Iterator[Conversion]:
    """Everything that can be found wrong before the first byte is written. Raises ConversionError with all of it."""
    findings = Findings()
    with tempfile.TemporaryDirectory(prefix="jaxspec-tokenizer-") as scratch:
        with findings.collecting():
            check_destination(dst, force=options.force)
        if line := entangled(src, dst):
            findings.add(line)
        sharding: Sharding | None = None
        with findings.collecting():
            sharding = None if options.mesh is None else make_sharding(options.mesh)
        plan: Plan | None = None
        carried: CarriedTokenizer | None = None
        with findings.collecting():
            source = open_source(src, options.source_format)
            with findings.collecting():
                plan = make_plan(source, options.dtype, int8=options.quantize == "int8")
            with findings.collecting():
                override = None if options.tokenizer is None else Path(options.tokenizer)
                carried = carry_tokenizer(source, override, Path(scratch))
        needed = 0 if plan is None else plan.nbytes + SMALL_FILES
        if line := too_small(dst, needed):
            findings.add(line)
        findings.raise_if_any()
        assert plan is not None
        yield Conversion(plan, carried, sharding, needed, disk_free(dst))


def _write(writer: CheckpointWriter, group: str, filled: Filled, conversion: Conversion) -> None:
    shardings: dict[str, Any] = {}
    if conversion.sharding is not None:
        specs = {name: leaf.spec for name, leaf in conversion.plan.leaves.items() if name in filled.tensors}
        # Scales are small: they stay whole.
        shardings = {leaf_of(name): conversion.sharding.named(spec.axes, spec.shape) for name, spec in specs.items()}
    leaves = {leaf_of(name): array for name, array in filled.tensors.items()}
    notes = {name: dataclasses.asdict(error) for name, error in filled.errors.items()}
    writer.write_group(group, leaves, shardings=shardings, notes=notes)


def leaf_of(name: str) -> str:
    """The key of a tensor inside its group."""
    return name.rpartition(".")[2]


def _resume_key(conversion: Conversion) -> str:
    """Stands for everything that the stored bytes depend on. Source files count by place, size and time of change."""
    source = conversion.plan.source
    said = {
        "format": FORMAT_VERSION,
        "dialect": source.dialect,
        "config": source.config.to_json(),
        "stored": {name: [dtype.name, shape] for name, (dtype, shape) in conversion.plan.stored.items()},
        "files": sorted([str(file.path.resolve()), file.size, file.modified] for file in source.files.values()),
        "mesh": None if conversion.sharding is None else dict(conversion.sharding.mesh.shape),
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _files(source: Source, carried: CarriedTokenizer | None) -> dict[str, SourceFile]:
    """Every file that the result depends on, by name. A tokenizer given apart stands in for the source's."""
    if carried is None or carried.replaces is None:
        return dict(source.files)
    replaced = set(TOKENIZER_FILES) - {GENERATION}
    kept = {name: file for name, file in source.files.items() if name not in replaced}
    return kept | {name: SourceFile(path) for name, path in carried.replaces.items()}


def _hashes(files: Mapping[str, SourceFile], report: Reporter) -> dict[str, str]:
    """sha256 of every file; most of each was hashed while its tensors were read."""
    with report.stage("hashing the rest", sum(file.unread for file in files.values())) as advance:
        return {name: file.sha256(advance) for name, file in files.items()}


def _manifest(
    conversion: Conversion, hashes: dict[str, str], errors: dict[str, QuantizationError], writer: CheckpointWriter
) -> Manifest:
    plan, carried = conversion.plan, conversion.carried
    stored = plan.stored
    dtypes = {stored[name][0].name for name in plan.leaves}
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
        tensors={name: writer.tensors[name] for name in stored},
        layout=None if conversion.sharding is None else dict(conversion.sharding.mesh.shape),
        quantization_errors={name: errors[name] for name in plan.leaves if name in errors},
    )
