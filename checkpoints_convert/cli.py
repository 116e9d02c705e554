"""``jaxspec-convert``: the commands. Exit status 0, 2 for a mistake of the user's, 1 for a fault."""

import argparse
import os
import sys
from collections.abc import Sequence

# Conversion needs no accelerator, and must not take one from a server on the same machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from checkpoints_convert.commands import heads, look, pack, to_hf, to_orbax
from checkpoints_convert.findings import ConversionError, one_line
from jaxspec.errors import UserError

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
        _complain((arguments.interrupted,))
        return INTERRUPTED
    except Exception as error:  # the last line of defence: one line, and nothing left behind (the writer saw to that)
        _complain((f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",))
        return FAULT


def _complain(findings: Sequence[str]) -> None:
    for finding in findings:
        print(f"error: {one_line(finding)}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxspec-convert", description="Converts and checks checkpoints.")
    parser.set_defaults(interrupted="interrupted")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    to_orbax.add_parser(commands)
    to_hf.add_parser(commands)
    heads.add_parser(commands)
    pack.add_parser(commands)
    look.add_parsers(commands)
    return parser
