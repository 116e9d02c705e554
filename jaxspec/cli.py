"""``jaxspec``: one completion (``generate``), or what a model thinks of given tokens (``score``). See docs/cli.md.

jax is imported inside the commands: --help and a mistake in a flag answer at once.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jaxspec import options, terminal
from jaxspec.engine.params import Prompt, SpeculationConfig, refuse_beam_search
from jaxspec.engine.records import Completion
from jaxspec.errors import InvalidRequest, UserError

if TYPE_CHECKING:
    from jaxspec.checkpoint import Checkpoint

PROG = "jaxspec"
DEFAULT_MAX_LEN: Final = 1024


def parser() -> argparse.ArgumentParser:
    """All subcommands and flags of ``jaxspec``."""
    parser = options.Parser(prog=PROG, description="Exact speculative decoding for Llama-family models.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    generate = commands.add_parser(
        "generate",
        help="stream one completion",
        description="Streams one completion to standard output. Without --max-len there is room for 1024 tokens, "
        "or for as many as the prompt and --max-tokens need.",
    )
    options.add_model_flags(generate)
    options.add_prompt_flags(generate)
    options.add_sampling_flags(generate)
    options.add_speculation_flags(generate)
    generate.add_argument("--num-beams", type=int, metavar="N", default=1, help="1 alone: beam search is refused")
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the stream")
    generate.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="of drafted tokens")
    generate.set_defaults(run=run_generate, max_len=None)

    score = commands.add_parser(
        "score",
        help="log-probabilities and perplexity of given tokens",
        description="Log-probability of each token given those before it. Without --max-len a sequence may be as "
        "long as the model's own context.",
    )
    options.add_model_flags(score)
    texts = score.add_argument_group("what to score (exactly one)").add_mutually_exclusive_group(required=True)
    texts.add_argument("--text", metavar="FILE", type=Path, help="a UTF-8 text")
    texts.add_argument("--token-ids", metavar="FILE.json", type=Path, help="a JSON list of lists of token ids")
    score.add_argument("--logits", metavar="OUT.npz", type=Path, help="write logits_0 [T, V] float32, logits_1, ...")
    score.add_argument("--json", action="store_true", help="print one JSON object, with every log-probability")
    score.set_defaults(run=run_score, max_len=None)

    check = commands.add_parser(
        "check-lossless",
        help="test on this very checkpoint that speculation changes nothing",
        description="Samples thousands of seeded texts with speculation and tests every position against the target's "
        "own law; compares greedy text, and sampled text under the coupled law, with plain decoding token for token. "
        "Exit status 0 when it is lossless, 1 when it is not.",
    )
    options.add_model_flags(check)
    options.add_speculation_flags(check)
    group = check.add_argument_group("what to test")
    group.add_argument("--samples", type=int, metavar="N", default=2000, help="sampled texts, 100 or more")
    group.add_argument("--tokens", type=int, metavar="N", default=12, help="tokens of each, 1 to 128")
    group.add_argument("--temperature", type=float, metavar="T", default=0.7, help="of sampled texts, above 0")
    group.add_argument("--top-p", type=float, metavar="P", default=0.9, help="of sampled texts")
    group.add_argument("--false-alarm", type=float, metavar="A", default=1e-3, help="chance of a wrong alarm")
    group.add_argument("--prompt", metavar="TEXT", action="append", help="may be repeated; else made ones")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.set_defaults(run=run_check, max_len=None)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 2 for a user's mistake, 1 for a fault."""
    args = parser().parse_args(argv)

    def command() -> int:
        try:
            status = args.run(args)
            sys.stdout.flush()
            if status is not None:
                return status
        except BrokenPipeError:
            # Whoever read has enough; what is left in the buffer must not fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return options.EXIT_FAULT
        return options.EXIT_OK

    return options.exit_status(f"{PROG} {args.command}", command)


# ---- generate --------------------------------------------------------------------------------------------------------


def run_generate(args: argparse.Namespace) -> None:
    """One request through an engine of one slot, compiled for the smallest window alone."""
    refuse_beam_search("num_beams", args.num_beams)
    speculation = options.speculation_from(args)
    prompt = options.prompt_from(args)
    sampling = options.sampling_from(args)
    if (note := options.unused_note(speculation)) is not None:
        sys.stderr.write(f"{PROG} generate: {note}\n")

    from jaxspec.checkpoint import open_checkpoint

    max_len = args.max_len
    if max_len is None:
        quarters = 1 if args.deterministic else 4
        checkpoint = open_checkpoint(args.target)
        max_len = context_for(checkpoint, prompt, sampling.max_tokens, speculation, quarters)
    with options.load_engine(args, speculation, max_slots=1, max_queue=0, max_len=max_len) as engine:
        engine.warmup(windows=1)  # before the clock starts, so that the timing is the model's
        chunks = engine.generate(prompt, sampling)
        if args.json:
            sys.stdout.write(f"{json.dumps(Completion.of(chunks).as_dict())}\n")
        else:
            terminal.show(chunks, colour=terminal.wants_colour(args.color))


def context_for(
    checkpoint: "Checkpoint",
    prompt: Prompt,
    max_tokens: int | None,
    speculation: SpeculationConfig | None = None,
    quarters: int = 4,
) -> int:
    """The max_len for one request: never below DEFAULT_MAX_LEN unless the model's own context is.

    The engine's smallest window is a quarter of max_len (``quarters`` = 1: all of it). If it holds the whole request,
    no window is ever outgrown, so nothing compiles twice; powers of two mean that other requests find the same shapes
    in the compilation cache. An open-ended request begins small and may grow, like a server's.
    """
    nodes = (speculation or SpeculationConfig()).slots_per_step
    needed = prompt_length(checkpoint, prompt) + (max_tokens or 1) + nodes
    window = 1 << (needed - 1).bit_length()
    wanted = window if max_tokens is None else quarters * window
    return min(checkpoint.config.max_position_embeddings, max(DEFAULT_MAX_LEN, wanted))


def prompt_length(checkpoint: "Checkpoint", prompt: Prompt) -> int:
    """Tokens of a prompt. Where the engine will refuse it anyway, the model's own context."""
    limit = checkpoint.config.max_position_embeddings
    if prompt.ids is not None:
        return len(prompt.ids)
    if checkpoint.tokenizer_dir is None:
        return limit
    from jaxspec.text import Tokenizer

    tokenizer = Tokenizer.load(checkpoint.tokenizer_dir)
    texts = [prompt.text or "", *(content for _, content in prompt.chat or ())]
    if not all(tokenizer.fits(text, limit) for text in texts):
        return limit
    if prompt.text is not None:
        return len(tokenizer.encode(prompt.text, add_bos=tokenizer.adds_bos))
    return len(tokenizer.encode_chat([{"role": role, "content": text} for role, text in prompt.chat or ()]))


# ---- score -----------------------------------------------------------------------------------------------------------


def run_score(args: argparse.Namespace) -> None:
    """Scores a text, or lists of token ids."""
    token_ids = None if args.token_ids is None else read_json(args.token_ids)
    text = None if args.text is None else read_text(args.text)

    import jax

    from jaxspec.checkpoint import open_checkpoint
    from jaxspec.engine.load import LARGEST_MAX_LEN, load
    from jaxspec.engine.params import SpeculationConfig
    from jaxspec.score import check_token_ids, score, totals

    checkpoint = open_checkpoint(args.target)
    max_len = args.max_len
    if max_len is None:
        max_len = min(checkpoint.config.max_position_embeddings, LARGEST_MAX_LEN)
    sequences = token_ids if text is None else [encode(checkpoint, text, max_len)]
    if not isinstance(sequences, list):
        raise InvalidRequest("token-ids", sequences, "a JSON list of lists of token ids")
    check_token_ids(sequences, checkpoint.config.vocab_size)
    for index, sequence in enumerate(sequences):
        if len(sequence) > max_len:
            field = f"token-ids[{index}]" if text is None else "text"
            raise InvalidRequest(field, f"{len(sequence)} tokens", f"at most {max_len} tokens (max_len)")

    if args.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", args.compilation_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    loaded = load(
        args.target,
        draft=None,
        speculation=SpeculationConfig(method="none"),
        mesh=args.mesh,
        dtype=args.dtype,
        max_slots=1,
        max_len=max_len,
    )
    programs = loaded.programs
    scores = score(programs.decoder.target, programs.params.target, sequences, args.logits)
    if args.json:
        whole = {"sequences": [each.as_dict() for each in scores], **totals(scores)}
        sys.stdout.write(f"{json.dumps(whole)}\n")
        return
    rows = [(f"sequence {index}", totals([each])) for index, each in enumerate(scores)] if len(scores) > 1 else []
    for name, total in (*rows, ("all", totals(scores))):
        sys.stdout.write(f"{name}: {in_words(total)}\n")


# ---- check-lossless --------------------------------------------------------------------------------------------------


def run_check(args: argparse.Namespace) -> int:
    """Runs the tests and prints the verdict. Exit status 0 when lossless, 1 when not."""
    from jaxspec.check import Task, run, show

    if args.samples < 100 or not 1 <= args.tokens <= 128 or not args.temperature > 0 or not 0 < args.false_alarm < 1:
        raise UserError(
            "check-lossless: expected --samples of 100 or more, --tokens in 1..128, --temperature above 0 and "
            f"--false-alarm in (0, 1), got {args.samples}, {args.tokens}, {args.temperature}, {args.false_alarm}"
        )
    task = Task(
        target=args.target,
        speculation=options.speculation_from(args),
        mesh=args.mesh,
        dtype=args.dtype,
        deterministic=args.deterministic,
        compilation_cache=args.compilation_cache,
        max_len=args.max_len,
        samples=args.samples,
        tokens=args.tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        false_alarm=args.false_alarm,
        prompts=tuple(args.prompt or ()),
    )
    report = run(task, lambda line: print(line, file=sys.stderr))
    sys.stdout.write(f"{json.dumps(report.as_dict())}\n" if args.json else f"{show(report)}\n")
    return options.EXIT_OK if report.lossless else options.EXIT_FAULT


def in_words(total: dict[str, Any]) -> str:
    """``jaxspec.score.totals`` as a line."""
    perplexity = "undefined" if total["perplexity"] is None else f"{total['perplexity']:.6g}"
    return f"{total['num_scored']} tokens scored, log-probability {total['total_logprob']:.6g}, perplexity {perplexity}"


def encode(checkpoint: "Checkpoint", text: str, max_len: int) -> list[int]:
    """Token ids of a text, with BOS where prompts of this model begin with it."""
    from jaxspec.text import Tokenizer

    if checkpoint.tokenizer_dir is None:
        raise UserError("text: expected --token-ids, because this checkpoint has no tokenizer")
    tokenizer = Tokenizer.load(checkpoint.tokenizer_dir)
    if not tokenizer.fits(text, max_len):
        raise InvalidRequest("text", f"{len(text)} characters", f"at most {max_len} tokens (max_len)")
    return tokenizer.encode(text, add_bos=tokenizer.adds_bos)


def read_text(path: Path) -> str:
    """A text file that says something. UserError names the file."""
    try:
        text = path.read_bytes().decode()  # not read_text, which would rewrite line ends
    except OSError as error:
        raise UserError(f"{path}: expected a file that can be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected UTF-8, got byte {error.object[error.start]:#04x} at {error.start}") from None
    if not text:
        raise UserError(f"{path}: expected at least 1 character, got an empty file")
    return text


def read_json(path: Path) -> Any:
    """The value in a JSON file. UserError names the file."""
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: expected JSON ({error})") from None


if __name__ == "__main__":
    sys.exit(main())
