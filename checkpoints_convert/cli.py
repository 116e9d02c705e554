"""``jaxspec-convert``: the commands. Exit status 0, 2 for a mistake of the user's, 1 for a fault."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Conversion needs no accelerator, and must not take one from a server on the same machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from checkpoints_convert.convert import QUANTIZE, Options, checked, convert
from checkpoints_convert.engine import DTYPES
from checkpoints_convert.findings import ConversionError
from checkpoints_convert.progress import reporter
from checkpoints_convert.readers import FORMATS
from checkpoints_convert.report import inspect_lines, plan_lines
from checkpoints_convert.verify import verify
from jaxspec.errors import UserError
from jaxspec.sharding import parse_mesh

LARGEST_MESH = 4096

USER_MISTAKE, FAULT, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ConversionError as error:
        _complain(error.findings)
        return USER_MISTAKE
    except UserError as error:
        _complain((str(error),))
        return USER_MISTAKE
    except KeyboardInterrupt:
        _complain(("interrupted; the same command again goes on from here",))
        return INTERRUPTED
    except Exception as error:  # the last line of defence: one line, and nothing left behind (the writer saw to that)
        _complain((f"{type(error).__name__}: {str(error).partition(chr(10))[0][:500]}",))
        return FAULT


def _to_orbax(arguments: argparse.Namespace) -> int:
    if arguments.mesh is not None:
        arguments.mesh = _virtual_devices(arguments.mesh)
    options = {
        "source_format": arguments.format,
        "dtype": arguments.dtype,
        "quantize": arguments.quantize,
        "tokenizer": arguments.tokenizer,
        "mesh": arguments.mesh,
        "force": arguments.force,
    }
    if arguments.dry_run:
        with checked(arguments.src, arguments.dst, Options(**options)) as conversion:
            print("\n".join(plan_lines(conversion)))
        return 0
    result = convert(arguments.src, arguments.dst, **options, progress=reporter())
    manifest = result.manifest
    if result.resumed:
        print(f"{result.path}: went on from an earlier run, which had finished {len(result.resumed)} groups")
    print(
        f"{result.path}: {manifest.parameter_count:,} parameters, {len(manifest.tensors)} tensors, {manifest.dtype}, "
        f"{manifest.family} {manifest.model_version}"
    )
    if manifest.tokenizer_fingerprint is None:
        print(f"{result.path}: the source has no tokenizer.json: this checkpoint takes and gives token ids only")
    return 0


def _virtual_devices(mesh: str) -> dict[str, int]:
    """As many CPU devices as the mesh has, so that arrays can be laid out for it. Before jax has made any."""
    shape = parse_mesh(mesh, LARGEST_MESH)
    if mesh.strip() == "auto":
        raise UserError("--mesh: expected N or data=D,model=M (the mesh that will serve), got auto")
    jax.config.update("jax_num_cpu_devices", shape["data"] * shape["model"])
    return shape


def _inspect(arguments: argparse.Namespace) -> int:
    print("\n".join(inspect_lines(arguments.dir)))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    result = verify(arguments.dir, arguments.against, reporter())
    if result.worst is not None:
        print(f"worst difference from the source: {result.worst.max_abs:.3g} in {result.worst.name}")
    if result.findings:
        _complain(result.findings)
        return USER_MISTAKE
    print(f"{arguments.dir}: {result.tensors} tensors, {result.nbytes:,} bytes, every sha256 as in the manifest")
    return 0


def _complain(findings: Sequence[str]) -> None:
    for finding in findings:
        print(f"error: {finding}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxspec-convert", description="Converts and checks checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    to_orbax = commands.add_parser("to-orbax", help="convert a Hugging Face folder or a GGUF file")
    to_orbax.add_argument("src", type=Path, metavar="SRC", help="Hugging Face folder, or GGUF file")
    to_orbax.add_argument("dst", type=Path, metavar="DST", help="folder to write")
    to_orbax.add_argument("--format", choices=FORMATS, default="auto", help="format of SRC (default: by its content)")
    to_orbax.add_argument("--dtype", choices=DTYPES, default="keep", help="stored dtype (default: keep, loses nothing)")
    to_orbax.add_argument(
        "--quantize", choices=QUANTIZE, default="none", help="int8: matrices as int8 with a scale per output channel"
    )
    to_orbax.add_argument(
        "--mesh", metavar="MESH", help="lay files out for this mesh, e.g. model=4: each device then reads only its own"
    )
    to_orbax.add_argument("--tokenizer", type=Path, metavar="DIR", help="take the tokenizer files from DIR")
    to_orbax.add_argument("--force", action="store_true", help="replace an earlier checkpoint at DST")
    to_orbax.add_argument("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    to_orbax.set_defaults(run=_to_orbax)
    inspect = commands.add_parser("inspect", help="print what a converted checkpoint holds")
    inspect.add_argument("dir", type=Path, metavar="DIR")
    inspect.set_defaults(run=_inspect)
    check = commands.add_parser("verify", help="recompute every checksum of a converted checkpoint")
    check.add_argument("dir", type=Path, metavar="DIR")
    check.add_argument("--against", type=Path, metavar="SRC", help="also compare every tensor with this source")
    check.set_defaults(run=_verify)
    return parser
