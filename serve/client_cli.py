"""``jaxspec-client``: streams a completion to the terminal, or asks a server about itself."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import grpc

from jaxspec import options
from jaxspec.engine.records import Chunk, Completion, Summary
from jaxspec.errors import UserError
from serve.client import CallFailed, Client

PROG = "jaxspec-client"
DRAFT_COLOUR, PLAIN_COLOUR = "\x1b[32m", "\x1b[0m"
# The model's text must not drive the terminal.
VISIBLE: Final = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"}
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
        show(chunks, colour=wants_colour(args.color))
    return options.EXIT_OK


def wants_colour(choice: str) -> bool:
    """``auto``: on a terminal, unless NO_COLOR is set."""
    return choice == "always" or (choice == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def show(chunks: Iterator[Chunk], *, colour: bool) -> None:
    """Writes text as it comes (token ids where the server has no tokenizer), then a line about it to standard error."""
    ids: list[int] = []
    has_text = False
    for chunk in chunks:
        ids.extend(chunk.token_ids)
        has_text = has_text or bool(chunk.text)
        sys.stdout.write(painted(chunk) if colour else chunk.text)
        sys.stdout.flush()
        if chunk.summary is not None:
            sys.stdout.write("\n" if has_text else f"{','.join(map(str, ids))}\n")
            sys.stdout.flush()
            sys.stderr.write(f"[{in_words(chunk.finish_reason or '', chunk.summary)}]\n")


def painted(chunk: Chunk) -> str:
    """The text with the shares of accepted drafts in colour."""
    parts, start = [], 0
    for end, origin in zip(chunk.text_ends, chunk.origins, strict=True):
        share = chunk.text[start:end].translate(VISIBLE)
        parts.append(f"{DRAFT_COLOUR}{share}{PLAIN_COLOUR}" if origin == "draft" and share else share)
        start = end
    parts.append(chunk.text[start:].translate(VISIBLE))
    return "".join(parts).replace(PLAIN_COLOUR + DRAFT_COLOUR, "")


def in_words(finish_reason: str, summary: Summary) -> str:
    """One line about a finished request."""
    usage, timing, drafts = summary.usage, summary.timing, summary.speculation
    words = f"{finish_reason}: {usage.completion_tokens} tokens after {usage.prompt_tokens}"
    if timing.tokens_per_s is not None:
        words += f", {timing.tokens_per_s:.1f} tokens/s"
    return (
        f"{words}, {drafts.tokens_per_target_pass:.2f} tokens per target pass, "
        f"{drafts.num_accepted_draft_tokens} of {drafts.num_draft_tokens} drafts accepted, seed {summary.seed}"
    )


if __name__ == "__main__":
    sys.exit(main())
