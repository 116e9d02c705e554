"""``jaxspec-convert pack DIR DST``: a converted checkpoint with its weights in one file, to ship."""

import argparse
from pathlib import Path

from checkpoints_convert.pack import DTYPES, pack


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command; its ``run`` gives the exit status and raises UserError for a user's mistake."""
    parser = commands.add_parser("pack", help="write heads or a draft as one safetensors file with its manifest")
    parser.add_argument("dir", type=Path, metavar="DIR", help="converted checkpoint: heads, or a small model")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="dtype of the weights (default: as stored)")
    parser.add_argument(
        "--beside", type=Path, metavar="TARGET", help="leave out the embeddings and LM head that this target has, too"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier checkpoint at DST")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    result = pack(arguments.dir, arguments.dst, dtype=arguments.dtype, beside=arguments.beside, force=arguments.force)
    shared = f", {' and '.join(result.shared)} of the target" if result.shared else ""
    print(f"{result.path}: {result.parameters:,} parameters, {result.dtype}, {result.nbytes:,} bytes{shared}")
    return 0
