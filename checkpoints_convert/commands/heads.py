"""``jaxspec-convert heads``: speculative heads, in and out."""

import argparse
from pathlib import Path

from checkpoints_convert.engine import DTYPES
from checkpoints_convert.heads import convert_heads
from checkpoints_convert.heads.convert import FORMATS, HEAD_METHODS
from checkpoints_convert.progress import reporter


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the sub-command."""
    parser = commands.add_parser("heads", help="convert Medusa and EAGLE heads, from and to other formats")
    parser.add_argument("src", type=Path, metavar="SRC", help="heads: a folder, or the file of weights in one")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to write")
    parser.add_argument("--target", type=Path, metavar="DIR", help="converted checkpoint that the heads must fit")
    parser.add_argument("--to", choices=FORMATS, default="orbax", help="format of DST (default: orbax, ours)")
    parser.add_argument("--method", choices=HEAD_METHODS, help="what SRC must be; refused if its tensors say otherwise")
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="stored dtype (default: keep, loses nothing)")
    parser.add_argument("--base", metavar="NAME", help="the target's name at Hugging Face, for other formats' config")
    parser.add_argument("--force", action="store_true", help="replace earlier heads at DST")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    result = convert_heads(
        arguments.src,
        arguments.dst,
        to=arguments.to,
        method=arguments.method,
        target=arguments.target,
        dtype=arguments.dtype,
        base=arguments.base,
        force=arguments.force,
        progress=reporter(),
    )
    print(
        f"{result.path}: {result.config.method} heads as {arguments.to}, {result.parameter_count:,} parameters, "
        f"from {result.source_format}"
    )
    for note in result.notes:
        print(f"{result.path}: {note}")
    if result.fingerprint is None and arguments.to == "orbax":
        print(f"{result.path}: bound to no tokenizer: give --target to check that the heads fit and to record it")
    return 0
