"""``jaxspec-train``: from a target checkpoint to heads that pay.

One flag per field of the config's records: a default, a range or a meaning is written once, in
``train_heads.config``.
"""

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jaxspec import options
from jaxspec.errors import UserError
from train_heads.config import OPTIONS, DataConfig, OptimConfig, RunConfig

PROG: Final = "jaxspec-train"
HELPS: Final = {
    "medusa": "Medusa-1 heads on the target's hidden state",
    "eagle": "an EAGLE-1 head: feature regression and what the target would say",
    "eagle3": "an EAGLE-3 head, fed its own outputs while it is trained",
    "draft": "a small draft model: layers of the target, distilled",
}


def parser() -> argparse.ArgumentParser:
    """All commands of ``jaxspec-train``."""
    parser = options.Parser(prog=PROG, description="Trains draft heads for a converted checkpoint (docs/train.md).")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=options.Parser)
    for kind, help in HELPS.items():
        _add_kind(commands, kind, help)
    _add_generate(commands)
    return parser


def _add_kind(commands: "argparse._SubParsersAction[options.Parser]", kind: str, help: str) -> None:
    command = commands.add_parser(kind, help=help, description=f"Trains {help}. A run that was killed goes on.")
    needed = command.add_argument_group("files")
    needed.add_argument("--target", metavar="DIR", help="converted checkpoint folder")
    needed.add_argument("--data", metavar="FILE.jsonl", help="documents: answers of generate-data, chats or texts")
    needed.add_argument("--out", metavar="DIR", help="folder of the run: checkpoints, logs, and heads at the end")
    needed.add_argument("--config", metavar="FILE.json", help="what --print-config prints; flags stand before it")
    needed.add_argument("--print-config", action="store_true", help="print the whole config as JSON and stop")
    _add_flags(command.add_argument_group("run"), RunConfig)
    _add_flags(command.add_argument_group("rows"), DataConfig, "data_seed")
    _add_flags(command.add_argument_group("optimiser"), OptimConfig)
    _add_flags(command.add_argument_group(kind), OPTIONS[kind])
    several = command.add_argument_group("several processes, each with the same flags and its own number")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0; without it there is one process")
    several.add_argument("--num-processes", type=int, metavar="N", help="processes in all")
    several.add_argument("--process-id", type=int, metavar="I", help="of this one, from 0")
    command.set_defaults(run=train, kind=kind)


def _add_flags(group: "argparse._ArgumentGroup", record: Any, seed: str = "seed") -> None:
    """One flag per field that has a help; not given, it is not among the parsed ones."""
    for field in dataclasses.fields(record):
        if "help" not in field.metadata:
            continue
        name = seed if field.name == "seed" else field.name
        shown = f"{field.metadata['help']}" + ("" if field.default is None else f"; default {field.default}")
        flag: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": shown}
        if isinstance(field.default, bool):
            flag["action"] = argparse.BooleanOptionalAction
        else:
            flag["type"] = typing.get_args(field.type)[0] if field.default is None else type(field.default)
            flag["metavar"] = {int: "N", float: "X"}.get(flag["type"], "TEXT")
        group.add_argument(f"--{name.replace('_', '-')}", **flag)


def config_from(args: argparse.Namespace) -> RunConfig:
    """The config of the file with the flags put over it. UserError for unknown keys and values out of range."""
    given = vars(args)
    values: dict[str, Any] = {}
    if args.config is not None:
        values = _read(Path(args.config))
        if values.setdefault("kind", args.kind) != args.kind:
            raise UserError(f"{args.config}: kind: expected {args.kind}, the command, got {values['kind']!r}")
    values["kind"] = args.kind
    for name in ("target", "data", "out"):
        if given[name] is not None:
            values[name] = given[name]
        if values.get(name) is None:
            raise UserError(f"{name}: expected --{name}, got none")
    values |= _given(RunConfig, given)
    for part, record, seed in (
        ("batches", DataConfig, "data_seed"),
        ("optim", OptimConfig, "seed"),
        ("options", OPTIONS[args.kind], "seed"),
    ):
        own = values.get(part, {})
        if isinstance(own, Mapping):
            values[part] = {**own, **_given(record, given, seed)}
    return RunConfig.from_json(values)


def _given(record: Any, given: Mapping[str, Any], seed: str = "seed") -> dict[str, Any]:
    names = {field.name: seed if field.name == "seed" else field.name for field in dataclasses.fields(record)}
    return {
        field.name: given[names[field.name]]
        for field in dataclasses.fields(record)
        if "help" in field.metadata and names[field.name] in given
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected JSON ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def train(args: argparse.Namespace) -> None:
    """Trains as the parsed flags say."""
    config = config_from(args)
    if args.print_config:
        sys.stdout.write(json.dumps(config.to_json(), indent=2) + "\n")
        return
    _join(args)
    from train_heads.loop import run

    result = run(config)
    if args.process_id:
        return
    sys.stdout.write(
        f"{result.heads}: step {result.step}, held-out loss {result.loss:.4f}, {result.tokens_per_s:.0f} tokens/s; "
        f"curves in {Path(config.out) / 'curves.png'}\n"
    )


def _join(args: argparse.Namespace) -> None:
    """Meets the other processes, if there are any: the mesh is then over the devices of all."""
    given = {name: getattr(args, name) for name in ("coordinator", "num_processes", "process_id")}
    if all(value is None for value in given.values()):
        return
    missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if missing:
        raise UserError(
            f"several processes: expected all of --coordinator, --num-processes, --process-id; "
            f"got no {', '.join(missing)}"
        )
    import jax

    jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)


def _add_generate(commands: "argparse._SubParsersAction[options.Parser]") -> None:
    command = commands.add_parser(
        "generate-data",
        help="let the target answer prompts: the data that heads learn from",
        description="Lets the target answer prompts, through the engine that serves it. A run that was killed goes on.",
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
    from jaxspec.checkpoint import open_checkpoint
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
    generate.check_settings(Path(args.out), config)  # before a model is loaded
    slots = args.max_slots
    with options.load_engine(args, speculation, max_slots=slots, max_queue=4 * slots, max_len=args.max_len) as engine:
        asks = generate.plan(engine, args.data, sampling, args.greedy_share, seed)[: args.limit]
        out = generate.Answers(Path(args.out), config)  # after all that can be refused
        try:
            counts = generate.generate(engine, asks, out, slots, Progress())
        finally:
            out.close()
    sys.stdout.write(f"{args.out}: {', '.join(f'{name} {count}' for name, count in counts.items())}\n")
