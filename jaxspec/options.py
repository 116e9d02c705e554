"""Command-line flags that several front doors share, and the way back from parsed flags to the frozen records.

Flags carry the names of the record fields in kebab case and take their defaults from the records: a default or a range
is written once, in ``jaxspec.engine.params``.
"""

import argparse
import dataclasses
import json
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from jaxspec.engine.params import (
    DRAFT_SAMPLE_METHODS,
    HEADS_METHODS,
    METHODS,
    REJECTION_SAMPLE_METHODS,
    Prompt,
    SamplingParams,
    SpeculationConfig,
    SpeculationParams,
)
from jaxspec.errors import UserError

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

EXIT_OK, EXIT_FAULT, EXIT_USER = 0, 1, 2
DTYPES = ("float32", "bfloat16")


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line (the usage is for --help), with unabbreviated flags only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER, f"{self.prog}: error: {message}\n")


def exit_status(prog: str, command: Callable[[], int | None]) -> int:
    """Runs ``command``: its own status, 2 and one line for a UserError, 1 and the traceback for anything else."""
    try:
        return command() or EXIT_OK
    except UserError as error:
        sys.stderr.write(f"{prog}: error: {error}\n")
        return EXIT_USER
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        return EXIT_FAULT
    except Exception as error:
        traceback.print_exc()
        sys.stderr.write(f"{prog}: fault: {type(error).__name__}: {error}\n")
        return EXIT_FAULT


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids separated by commas, got {text!r}") from None


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """--prompt, --chat or --prompt-ids: exactly one."""
    prompts = parser.add_argument_group("prompt (exactly one)").add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", help="plain text to continue")
    prompts.add_argument("--chat", metavar="TEXT", help="a user's message, laid out by the model's chat template")
    prompts.add_argument("--prompt-ids", metavar="1,2,3", type=_token_ids, help="token ids, taken as they are")


def prompt_from(args: argparse.Namespace) -> Prompt:
    """The prompt that the flags give. UserError without one."""
    if args.prompt is None and args.chat is None and args.prompt_ids is None:
        raise UserError("prompt: expected one of --prompt, --chat and --prompt-ids, got none")
    chat = None if args.chat is None else (("user", args.chat),)
    prompt = Prompt(text=args.prompt, ids=args.prompt_ids, chat=chat)
    prompt.validate()
    return prompt


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of SamplingParams."""
    default = SamplingParams()
    group = parser.add_argument_group("sampling")

    def flag(name: str, **options: Any) -> None:
        group.add_argument(name, **options)

    flag("--max-tokens", type=int, metavar="N", default=default.max_tokens, help="None: up to the context length")
    flag("--min-tokens", type=int, metavar="N", default=default.min_tokens, help="no stop token before it")
    flag("--temperature", type=float, metavar="T", default=default.temperature, help="0 (greedy), or 1e-6 to 100")
    flag("--top-k", type=int, metavar="K", default=default.top_k, help="0: off")
    flag("--top-p", type=float, metavar="P", default=default.top_p, help="in (0, 1]; 1: off")
    flag("--min-p", type=float, metavar="P", default=default.min_p, help="in [0, 1]; 0: off")
    flag("--seed", type=int, metavar="S", default=default.seed, help="0 to 2**64-1; None: random, and reported")
    flag("--stop", action="append", metavar="TEXT", default=None, help="end before this text; may be repeated")
    flag("--stop-token-ids", type=_token_ids, metavar="1,2", default=default.stop_token_ids, help="more stop tokens")
    flag("--ignore-eos", action="store_true", help="go on after end-of-sequence tokens")
    flag("--logprobs", type=int, metavar="N", default=default.logprobs, help="alternatives per token, 0 to 8")
    flag("--show-special-tokens", action="store_true", help="keep special tokens in the text")


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    """Checked SamplingParams from the flags. InvalidRequest (a UserError) names the first one out of range."""
    sampling = SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop or ()),
        stop_token_ids=args.stop_token_ids,
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
        skip_special_tokens=not args.show_special_tokens,
    )
    sampling.validate()
    return sampling


def add_request_speculation_flags(parser: argparse.ArgumentParser) -> None:
    """What one request may say about speculation (for clients of a running server)."""
    group = parser.add_argument_group("speculation (None: the server's choice)")
    helps = {
        "num_speculative_tokens": "drafted tokens per step, 0 to 8; 0: plain decoding",
        "prompt_lookup_max": "longest n-gram looked up, at most the server's",
        "prompt_lookup_min": "shortest n-gram looked up",
    }
    for field in dataclasses.fields(SpeculationParams):
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(flag, type=int, metavar="N", default=field.default, help=helps[field.name])


def request_speculation_from(args: argparse.Namespace) -> SpeculationParams:
    """Checked SpeculationParams from the flags."""
    names = [field.name for field in dataclasses.fields(SpeculationParams)]
    speculation = SpeculationParams(**{name: getattr(args, name) for name in names})
    speculation.validate()
    return speculation


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of SpeculationConfig, and --speculative-config with the same as JSON (to load a model)."""
    default = SpeculationConfig()
    group = parser.add_argument_group("speculation (fixed while the model is loaded)")

    def flag(name: str, field: str, help: str, **options: Any) -> None:
        # The parsed default stays None, so that a flag that was given can be told from one that was not.
        group.add_argument(name, dest=field, default=argparse.SUPPRESS, help=help, **options)

    flag(
        "--method",
        "method",
        f"default {default.method}; draft_model when --draft is given, what the heads are when --heads is given",
        choices=METHODS,
    )
    for name in ("--draft", "--model"):
        flag(name, "model", "folder of the draft checkpoint", metavar="DIR")
    flag("--heads", "heads", "folder of converted Medusa or EAGLE heads", metavar="DIR")
    flag(
        "--num-speculative-tokens",
        "num_speculative_tokens",
        f"levels drafted per step, 0 to 8; default {default.num_speculative_tokens}",
        type=int,
        metavar="N",
    )
    flag(
        "--prompt-lookup-max",
        "prompt_lookup_max",
        f"longest n-gram looked up; default {default.prompt_lookup_max}",
        type=int,
        metavar="N",
    )
    flag(
        "--prompt-lookup-min",
        "prompt_lookup_min",
        f"shortest n-gram looked up; default {default.prompt_lookup_min}",
        type=int,
        metavar="N",
    )
    flag(
        "--draft-vocab-size",
        "draft_vocab_size",
        "ids that the draft model or the heads may say, most frequent first; default what their folder lists, or all",
        type=int,
        metavar="N",
    )
    flag(
        "--draft-sample-method",
        "draft_sample_method",
        "how drafts are chosen when sampling: the likeliest, or drawn; default drawn, greedy for EAGLE's trees",
        choices=DRAFT_SAMPLE_METHODS,
    )
    flag("--tree-choices", "tree_choices", "medusa's tree: 4,2,1 or [[0],[1],[0,0]]; several with ;", metavar="TREE")
    flag(
        "--tree-topk",
        "tree_topk",
        f"children per node of EAGLE's tree; 1: a chain; default {default.tree_topk}",
        type=int,
        metavar="K",
    )
    flag("--tree-depth", "tree_depth", "levels of EAGLE's tree, 1 to 8; default 5 at most", type=int, metavar="N")
    flag(
        "--tree-nodes",
        "tree_nodes",
        f"nodes of EAGLE's tree with the pending token; default {default.tree_nodes}",
        type=int,
        metavar="N",
    )
    for name, what in (
        ("window", "columns of guesses in lookahead's window"),
        ("ngram", "tokens of lookahead's n-grams, 2 to 9"),
        ("candidates", "n-grams that lookahead tries in a step"),
    ):
        field = f"lookahead_{name}"
        flag(f"--lookahead-{name}", field, f"{what}; default {getattr(default, field)}", type=int, metavar="N")
    flag(
        "--rejection-sample-method",
        "rejection_sample_method",
        f"acceptance law; default {default.rejection_sample_method}",
        choices=REJECTION_SAMPLE_METHODS,
    )
    group.add_argument("--speculative-config", metavar="JSON", help="the same options as one JSON object")
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="every step in one padded shape: plain and speculative text alike to the last bit; slower",
    )


def speculation_from(args: argparse.Namespace) -> SpeculationConfig:
    """The SpeculationConfig that flags and --speculative-config give together.

    UserError for unknown keys, a key given both ways, a value out of range, or a method without the folder it needs.
    """
    names = {field.name for field in dataclasses.fields(SpeculationConfig)}
    flags = {name: value for name, value in vars(args).items() if name in names}
    values: dict[str, Any] = {}
    if args.speculative_config is not None:
        values = _json_object("speculative-config", args.speculative_config)
        twice = ", ".join(sorted(set(values) & set(flags)))
        if twice:
            raise UserError(f"speculative-config: expected each option once, got {twice} as flag and as key")
    values |= flags
    if values.get("method") is None and values.get("heads") is not None and values.get("model") is not None:
        raise UserError("method: expected one, because both --draft and --heads are given")
    if values.get("heads") is not None and "method" not in values:
        values["method"] = _method_of(values["heads"])
    if values.get("model") is not None:
        values.setdefault("method", "draft_model")
    config = SpeculationConfig.from_mapping(values)
    if config.method == "draft_model" and config.model is None:
        raise UserError("method draft_model: expected the draft's folder in --draft, got none")
    if config.method == "hybrid" and (config.model is None) == (config.heads is None):
        got = "none" if config.model is None else "both"
        raise UserError(f"method hybrid: expected the draft's folder in --draft or the heads' in --heads, got {got}")
    if config.method in HEADS_METHODS and config.heads_folder is None:
        raise UserError(f"method {config.method}: expected the heads' folder in --heads, got none")
    return config


def _method_of(heads: Any) -> str:
    """The method that a folder of heads is for. UserError when it is no such folder."""
    if not isinstance(heads, str):
        raise UserError(f"heads: expected the path of a checkpoint folder, got {heads!r}")
    from jaxspec.checkpoint import open_heads  # imports jax

    return open_heads(heads).config.method


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"{name}: expected JSON, got {text!r} ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{name}: expected a JSON object, got {text!r}")
    return values


def unused_note(config: SpeculationConfig) -> str | None:
    """A line about a folder that the method ignores, or None."""
    if config.heads is not None and not config.takes_heads:
        return f"--heads {config.heads}: ignored, method {config.method} uses no heads"
    takes_model = config.takes_draft or (config.takes_heads and config.heads is None)
    if config.model is not None and not takes_model:
        return f"--draft {config.model}: ignored, method {config.method} uses no draft model"
    return None


def load_engine(
    args: argparse.Namespace, speculation: SpeculationConfig, *, max_slots: int, max_queue: int, max_len: int
) -> "Engine":
    """The engine that :func:`add_model_flags` and :func:`add_speculation_flags` describe. UserError as it raises."""
    # Imported here: whoever asks for help, or waits for a port, does not wait for jax.
    from jaxspec.engine.engine import Engine

    return Engine.load(
        args.target,
        draft=speculation.model,
        speculation=speculation,
        mesh=args.mesh,
        dtype=args.dtype,
        max_slots=max_slots,
        max_len=max_len,
        max_queue=max_queue,
        deterministic=args.deterministic,
        compilation_cache=args.compilation_cache,
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Where the model is and how it is placed (to load a model)."""
    group = parser.add_argument_group("model")
    group.add_argument("--target", metavar="DIR", required=True, help="converted checkpoint folder")
    group.add_argument("--mesh", metavar="MESH", default="auto", help="auto, a device count, or data=1,model=4")
    group.add_argument("--dtype", choices=DTYPES, help="of the weights; default float32 on CPU, bfloat16 elsewhere")
    group.add_argument(
        "--max-len", metavar="N", type=int, default=1024, help="tokens of prompt and completion together"
    )
    group.add_argument("--compilation-cache", metavar="DIR", help="keep compiled programs here between runs")
