"""``jaxspec-client``: streams a completion to the terminal, or asks a server about itself."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Final

import grpc

from jaxspec import options, terminal
from jaxspec.engine.records import Completion
from jaxspec.errors import UserError
from serve.client import CallFailed, Client

PROG = "jaxspec-client"
USER_CODES: Final = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS)


def parser() -> argparse.ArgumentParser:
    """All flags of ``jaxspec-client``."""
    parser = options.Parser(
        prog=PROG, description="Streams a completion from a jaxspec-serve, drafted tokens in green."
    )
    parser.add_argument("--addr", default="127.0.0.1:50051", metavar="HOST:PORT")
    options.add_prompt_flags(parser)
    options.add_sampling_flags(parser)
    options.add_request_speculation_flags(parser)
    parser.add_argument("--request-id", metavar="ID", help="a name for --abort and the server's logs")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="deadline of the call")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the stream")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    questions = parser.add_argument_group("questions (instead of a prompt)").add_mutually_exclusive_group()
    questions.add_argument("--info", action="store_true", help="what is served, as JSON")
    questions.add_argument("--server-info", action="store_true", help="how it is served, as JSON")
    questions.add_argument("--loads", action="store_true", help="what the server is doing, as JSON")
    questions.add_argument("--health", action="store_true", help="SERVING (status 0) or NOT_SERVING (status 1)")
    questions.add_argument("--abort", metavar="ID", help="end a request; status 1 when there is no such one")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 2 for a user's mistake (as the server sees it too), 1 for anything else."""
    args = parser().parse_args(argv)

    def command() -> int:
        try:
            with Client(args.addr) as client:
                return answer(client, args)
        except CallFailed as failed:
            sys.stderr.write(f"{PROG}: error: {failed}\n")
            return options.EXIT_USER if failed.code in USER_CODES else options.EXIT_FAULT
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit does not flush into it
            return options.EXIT_FAULT

    return options.exit_status(PROG, command)


def answer(client: Client, args: argparse.Namespace) -> int:
    """Does what the flags ask for; the exit status."""
    if args.timeout_s is not None and not 0 < args.timeout_s < float("inf"):
        raise UserError(f"timeout-s: expected a positive number of seconds, got {args.timeout_s}")
    if args.health:
        serving = client.serving(timeout_s=args.timeout_s)
        sys.stdout.write("SERVING\n" if serving else "NOT_SERVING\n")
        return options.EXIT_OK if serving else options.EXIT_FAULT
    if args.abort is not None:
        found = client.abort(args.abort, timeout_s=args.timeout_s)
        sys.stdout.write(f"{json.dumps({'found': found})}\n")
        return options.EXIT_OK if found else options.EXIT_FAULT
    for asked, question in (
        (args.info, client.model_info),
        (args.server_info, client.server_info),
        (args.loads, client.loads),
    ):
        if asked:
            sys.stdout.write(f"{json.dumps(dataclasses.asdict(question(timeout_s=args.timeout_s)))}\n")
            return options.EXIT_OK
    chunks = client.generate(
        options.prompt_from(args),
        options.sampling_from(args),
        options.request_speculation_from(args),
        request_id=args.request_id,
        timeout_s=args.timeout_s,
    )
    if args.json:
        sys.stdout.write(f"{json.dumps(Completion.of(chunks).as_dict())}\n")
    else:
        terminal.show(chunks, colour=terminal.wants_colour(args.color))
    return options.EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
