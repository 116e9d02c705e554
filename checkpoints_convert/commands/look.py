"""``jaxspec-convert inspect DIR`` and ``verify DIR``: what a converted checkpoint holds, and whether it still does."""

import argparse
from pathlib import Path
from typing import Any

from checkpoints_convert.findings import ConversionError
from checkpoints_convert.progress import reporter
from checkpoints_convert.report import inspect_lines
from checkpoints_convert.verify import verify


def add_parsers(commands: "argparse._SubParsersAction[Any]") -> None:
    """Registers both; their ``run`` gives the exit status and raises UserError for a user's mistake."""
    inspect = commands.add_parser("inspect", help="print what a converted checkpoint holds")
    inspect.add_argument("dir", type=Path, metavar="DIR")
    inspect.set_defaults(run=_inspect)
    check = commands.add_parser("verify", help="recompute every checksum of a converted checkpoint")
    check.add_argument("dir", type=Path, metavar="DIR")
    check.add_argument("--against", type=Path, metavar="SRC", help="also compare every tensor with this source")
    check.set_defaults(run=_verify)


def _inspect(arguments: argparse.Namespace) -> int:
    print("\n".join(inspect_lines(arguments.dir)))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    result = verify(arguments.dir, arguments.against, reporter())
    if result.worst is not None:
        print(f"worst difference from the source: {result.worst.max_abs:.3g} in {result.worst.name}")
    if result.findings:
        raise ConversionError(result.findings)
    print(f"{arguments.dir}: {result.tensors} tensors, {result.nbytes:,} bytes, every sha256 as in the manifest")
    return 0
