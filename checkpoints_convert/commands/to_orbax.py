"""``jaxspec-convert to-orbax SRC DST``: a foreign checkpoint in."""

import argparse
from pathlib import Path
from typing import Any, Final

import jax

from checkpoints_convert.convert import QUANTIZE, Options, checked, convert
from checkpoints_convert.engine import DTYPES
from checkpoints_convert.progress import reporter
from checkpoints_convert.readers import FORMATS
from checkpoints_convert.report import plan_lines
from jaxspec.errors import UserError
from jaxspec.sharding import parse_mesh

_LARGEST_MESH: Final = 4096


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Registers the command; its ``run`` gives the exit status and raises UserError for a user's mistake."""
    parser = commands.add_parser("to-orbax", help="convert a Hugging Face folder, a GGUF file or a Meta folder")
    parser.add_argument("src", type=Path, metavar="SRC", help="Hugging Face or Meta folder, or GGUF file")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to write")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="format of SRC (default: by its content)")
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="stored dtype (default: keep, loses nothing)")
    parser.add_argument(
        "--quantize", choices=QUANTIZE, default="none", help="int8: matrices as int8 with a scale per output channel"
    )
    parser.add_argument(
        "--mesh", metavar="MESH", help="lay files out for this mesh, e.g. model=4: each device then reads only its own"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="take the tokenizer files from DIR")
    parser.add_argument("--force", action="store_true", help="replace an earlier checkpoint at DST")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    parser.set_defaults(run=_run, interrupted="interrupted; the same command again goes on from here")


def _run(arguments: argparse.Namespace) -> int:
    options = Options(
        source_format=arguments.format,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        tokenizer=arguments.tokenizer,
        mesh=None if arguments.mesh is None else _virtual_devices(arguments.mesh),
        force=arguments.force,
    )
    if arguments.dry_run:
        with checked(arguments.src, arguments.dst, options) as conversion:
            print("\n".join(plan_lines(conversion)))
        return 0
    result = convert(arguments.src, arguments.dst, progress=reporter(), **vars(options))
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
    if mesh.strip() == "auto":
        raise UserError("--mesh: expected N or data=D,model=M (the mesh that will serve), got auto")
    shape = parse_mesh(mesh, _LARGEST_MESH)
    jax.config.update("jax_num_cpu_devices", shape["data"] * shape["model"])
    return shape
