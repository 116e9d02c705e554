"""``jaxspec-train``: from a target checkpoint to heads that pay."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec import options

PROG = "jaxspec-train"


def parser() -> argparse.ArgumentParser:
    """All commands of ``jaxspec-train``."""
    parser = options.Parser(prog=PROG, description="Trains draft heads for a converted checkpoint (docs/train.md).")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=options.Parser)
    _add_generate(commands)
    return parser


def _add_generate(commands: "argparse._SubParsersAction[options.Parser]") -> None:
    command = commands.add_parser(
        "generate-data", help="let the target answer prompts: the data that heads learn from", description=__doc__
    )
    options.add_model_flags(command)
    group = command.add_argument_group("data")
    group.add_argument("--data", metavar="FILE.jsonl", required=True, help="prompts, chats or texts")
    group.add_argument("--out", metavar="FILE.jsonl", required=True, help="answers; a run that was killed goes on")
    group.add_argument("--limit", type=int, metavar="N", help="answer so many prompts, a fair sample; default all")
    group.add_argument(
        "--greedy-share", type=float, metavar="P", default=0.5, help="of the prompts, answered at temperature 0"
    )
    group.add_argument("--max-slots", type=int, metavar="N", default=16, help="requests that run at once")
    options.add_sampling_flags(command)
    options.add_speculation_flags(command)
    command.set_defaults(run=generate_data)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 2 for a user's mistake, 1 for a fault."""
    args = parser().parse_args(argv)
    return options.exit_status(PROG, lambda: args.run(args))


def generate_data(args: argparse.Namespace) -> None:
    """Answers prompts as the parsed flags say."""
    from jaxspec import Engine
    from jaxspec.checkpoint import open_checkpoint
    from jaxspec.errors import UserError
    from train_heads import generate
    from train_heads.progress import Progress

    speculation = options.speculation_from(args)
    sampling = options.sampling_from(args)
    if not 0 <= args.greedy_share <= 1:
        raise UserError(f"greedy-share: expected a share in [0, 1], got {args.greedy_share}")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"limit: expected at least 1 prompt, got {args.limit}")
    seed = args.seed or 0
    config = generate.GenerateConfig.of(
        open_checkpoint(args.target), args.data, sampling, args.greedy_share, seed, args.max_len
    )
    out = generate.Answers(Path(args.out), config)
    with Engine.load(
        args.target,
        draft=speculation.model,
        speculation=speculation,
        mesh=args.mesh,
        dtype=args.dtype,
        max_slots=args.max_slots,
        max_len=args.max_len,
        max_queue=4 * args.max_slots,
        deterministic=args.deterministic,
        compilation_cache=args.compilation_cache,
    ) as engine:
        try:
            asks = generate.plan(engine, args.data, sampling, args.greedy_share, seed)[: args.limit]
            counts = generate.generate(engine, asks, out, args.max_slots, Progress())
        finally:
            out.close()
    sys.stdout.write(f"{args.out}: {', '.join(f'{name} {count}' for name, count in counts.items())}\n")
