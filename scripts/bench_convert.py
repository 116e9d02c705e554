"""``make bench-convert``: what a conversion needs, on a made model of 8 layers and 4 GB.

Peak resident memory against the largest tensor, and time against ``cp``, ``sync`` and ``sha256sum`` of the same bytes,
each in turn within this run. The last line is one JSON object with the figures and where they came from.
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
V, D, F, N, K, H, LAYERS = 128256, 4096, 11264, 32, 8, 128, 8
MEMORY_SLACK: Final = 400e6  # bytes that a conversion may need besides 1.5 of its largest tensor
_SHARDS: Final = 4
_BLOCK_VALUES: Final = 16 << 20

CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of the made model under their Hugging Face names."""
    yield "model.embed_tokens.weight", (V, D)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (D,)
        yield f"{layer}.mlp.down_proj.weight", (D, F)
        yield f"{layer}.mlp.gate_proj.weight", (F, D)
        yield f"{layer}.mlp.up_proj.weight", (F, D)
        yield f"{layer}.post_attention_layernorm.weight", (D,)
        yield f"{layer}.self_attn.k_proj.weight", (K * H, D)
        yield f"{layer}.self_attn.o_proj.weight", (D, N * H)
        yield f"{layer}.self_attn.q_proj.weight", (N * H, D)
        yield f"{layer}.self_attn.v_proj.weight", (K * H, D)
    yield "model.norm.weight", (D,)


def make_model(folder: Path) -> tuple[int, int]:
    """Writes the made model in four files; gives its bytes and those of its largest tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    block = np.random.default_rng(1).standard_normal(_BLOCK_VALUES, np.float32).astype(ml_dtypes.bfloat16).view("u1")
    tensors = list(shapes())
    weight_map: dict[str, str] = {}
    for number in range(_SHARDS):
        part = tensors[number * len(tensors) // _SHARDS : (number + 1) * len(tensors) // _SHARDS]
        name = f"model-{number + 1:05}-of-{_SHARDS:05}.safetensors"
        weight_map |= {tensor: name for tensor, _ in part}
        entries: dict[str, Any] = {}
        end = 0
        for tensor, shape in part:
            begin, end = end, end + 2 * math.prod(shape)
            entries[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        header = json.dumps(entries).encode()
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            while end > 0:
                file.write(block[: min(end, block.size)].data)
                end -= block.size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sizes = [2 * math.prod(shape) for _, shape in tensors]
    return sum(sizes), max(sizes)


def plain_tools(source: Path, scratch: Path) -> float:
    """Seconds that cp, sync and sha256sum of the source take."""
    start = time.perf_counter()
    shutil.rmtree(scratch, ignore_errors=True)
    subprocess.run(["cp", "-r", source, scratch], check=True)
    subprocess.run(["sync", *sorted(scratch.iterdir())], check=True)
    subprocess.run(["sha256sum", *sorted(source.iterdir())], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def conversion(source: Path, scratch: Path, *options: str) -> tuple[float, int]:
    """Seconds that a conversion takes from the start of Python on, and its peak resident bytes."""
    command = [sys.executable, "-m", "checkpoints_convert", "to-orbax", source, scratch, "--force", *options]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(process.returncode)
    return time.perf_counter() - start, usage.ru_maxrss << 10


def main() -> int:
    """Exit status 0 whatever the figures are; the goals stand beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where 12 GB may be written (default: the system's temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jaxspec-bench-", dir=arguments.dir) as scratch:
        source, copy, out = Path(scratch, "source"), Path(scratch, "copy"), Path(scratch, "out")
        print("making the model", flush=True)
        total, largest = make_model(source)
        rounds = []
        for number in range(arguments.repeats):
            tools = plain_tools(source, copy)
            shutil.rmtree(copy)
            ours, peak = conversion(source, out)
            rounds.append((tools, ours, peak))
            print(
                f"round {number + 1}: cp, sync, sha256sum {tools:.1f} s; conversion {ours:.1f} s, "
                f"{tools / ours:.2f} of their speed; peak {peak / 1e6:,.0f} MB",
                flush=True,
            )
        packed, packed_peak = conversion(source, out, "--quantize", "int8")
    ratios = sorted(tools / ours for tools, ours, _ in rounds)
    figures = {
        "bytes": total,
        "largest_tensor_bytes": largest,
        "speed_of_plain_tools": {
            "median": round(statistics.median(ratios), 2),
            "min": round(ratios[0], 2),
            "max": round(ratios[-1], 2),
            "goal": 0.5,
        },
        "seconds": round(statistics.median(ours for _, ours, _ in rounds), 1),
        "peak_bytes": max(peak for *_, peak in rounds),
        "peak_goal_bytes": int(1.5 * largest + MEMORY_SLACK),
        "int8": {"seconds": round(packed, 1), "peak_bytes": packed_peak},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    print(json.dumps({"bench_convert": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
