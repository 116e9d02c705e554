"""``jaxspec-convert to-hf DIR DST``: a checkpoint folder out to a Hugging Face folder."""

import argparse
from pathlib import Path

from checkpoints_convert.export.hf import DTYPES, SHARD_SIZE, to_hf
from checkpoints_convert.progress import reporter


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command; its ``run`` gives the exit status and raises UserError for a user's mistake."""
    parser = commands.add_parser("to-hf", help="write a converted checkpoint as a Hugging Face folder")
    parser.add_argument("dir", type=Path, metavar="DIR", help="converted checkpoint")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to write")
    parser.add_argument(
        "--shard-size", default=SHARD_SIZE, metavar="SIZE", help="most bytes of weights in a file (default: 5GB)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="dtype of the weights (default: as stored)")
    parser.add_argument("--force", action="store_true", help="replace an earlier Hugging Face folder at DST")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    result = to_hf(
        arguments.dir,
        arguments.dst,
        shard_size=arguments.shard_size,
        dtype=arguments.dtype,
        force=arguments.force,
        progress=reporter(),
    )
    files = result.files[0] if len(result.files) == 1 else f"{len(result.files)} files"
    print(f"{result.path}: {result.parameters:,} parameters, {result.tensors} tensors, {result.dtype}, {files}")
    if result.dequantized:
        print(
            f"{result.path}: {len(result.dequantized)} parameters are stored as int8: "
            f"written multiplied out, in {result.dtype if arguments.dtype != 'keep' else 'float32'}"
        )
    if not result.has_tokenizer:
        print(f"{result.path}: the checkpoint has no tokenizer: this folder takes and gives token ids only")
    return 0
