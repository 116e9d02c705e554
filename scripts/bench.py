"""``make bench``: what speculation gains, and what the machinery around the model costs, on the demo model.

Every figure is a ratio of things measured in turn within this run, as medians with their spread, so that it stands on a
noisy machine. The last line is one JSON object with the figures and where they came from.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from demo_prompts import DemoPrompt, demo_prompts
from rich.console import Console
from rich.table import Table

from jaxspec import Completion, Prompt, SamplingParams, SpeculationParams
from jaxspec.engine.engine import Engine
from jaxspec.model.cache import empty_cache
from jaxspec.model.llama import ModelDef, define, random_params
from jaxspec.speculate.drafters.linear import LinearDrafter
from jaxspec.speculate.programs import Programs
from jaxspec.speculate.sampling import first_argmax
from jaxspec.speculate.state import DecodeState
from jaxspec.speculate.step import Decoder, Params

ROOT = Path(__file__).resolve().parent.parent
SLOTS, LENGTH = 4, 1024  # what the demo serves with
PROSE = Prompt(text="The morning after the storm, the harbour was quieter than anyone could remember.")


def interleaved(repeats: int, *functions: Callable[[], float]) -> list[list[float]]:
    """Runs the functions in turn, ``repeats`` times; one list of results per function."""
    rounds = [[function() for function in functions] for _ in range(repeats)]
    return [list(results) for results in zip(*rounds, strict=True)]


def ratio(upper: list[float], lower: list[float]) -> dict[str, float]:
    """Median of the pairwise ratios, and their range."""
    ratios = sorted(u / v for u, v in zip(upper, lower, strict=True))
    return {"median": round(statistics.median(ratios), 3), "min": round(ratios[0], 3), "max": round(ratios[-1], 3)}


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of one call that waits for its result."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def speed(engine: Engine, prompt: DemoPrompt, repeats: int) -> dict[str, Any]:
    """Decoding tokens/s with and without speculation, greedy, one request at a time."""
    sampling = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0)
    seen: dict[int, Completion] = {}

    def run(gamma: int) -> float:
        seen[gamma] = Completion.of(engine.generate(prompt.prompt, sampling, SpeculationParams(gamma)))
        return seen[gamma].summary.timing.tokens_per_s or 0.0

    plain, speculative = interleaved(repeats, lambda: run(0), lambda: run(8))
    return {
        "ratio": ratio(speculative, plain),
        "plain_tokens_per_s": round(statistics.median(plain), 1),
        "spec_tokens_per_s": round(statistics.median(speculative), 1),
        "tokens_per_target_pass": round(seen[8].summary.speculation.tokens_per_target_pass, 2),
        "ids_equal": seen[0].token_ids == seen[8].token_ids,
    }


class Bare:
    """The jitted forward alone: ids in, greedy ids of the last ``judged`` positions out."""

    def __init__(self, model: ModelDef, params: dict[str, jax.Array], rows: int, slots: int, width: int) -> None:
        def forward(params: Any, tokens: jax.Array, positions: jax.Array, cache: Any) -> Any:
            merged = model.merge(params)
            output = merged(tokens, positions, cache)
            judged = output.hidden_BTD[:, -1:] if width > 16 else output.hidden_BTD
            return first_argmax(merged.logits(judged)), output.cache

        self._forward = jax.jit(forward, donate_argnums=3)
        self._params = params
        self._cache = jax.jit(lambda: empty_cache(model.config, model.sharding, rows, slots, model.cache_dtype))()
        self._tokens = jnp.ones((rows, width), jnp.int32)
        start = 100 if width <= 16 else 0
        self._positions = jnp.broadcast_to(start + jnp.arange(width, dtype=jnp.int32)[None], (rows, width))
        self()

    def __call__(self) -> None:
        ids, self._cache = self._forward(self._params, self._tokens, self._positions, self._cache)
        np.asarray(ids)


class Step:
    """The compiled step on rows that never end, reading its report as the engine does."""

    def __init__(self, programs: Programs, rows: int, window: int, gamma: int) -> None:
        self._programs, self._gamma = programs, gamma
        self._gamma_B = np.full((rows,), gamma, np.int32)
        decoder = programs.decoder
        layout = jax.tree.map(lambda x: x.sharding, programs.abstract_state(rows, window))
        self._fresh: Callable[[], DecodeState] = jax.jit(
            lambda: _running(decoder.empty(rows, window), 100), out_shardings=layout
        )
        self._state = self._fresh()
        self()

    def __call__(self) -> None:
        self._state, report = self._programs.step(self._state, self._gamma_B, self._gamma)
        np.asarray(report.packed)

    def rewind(self) -> None:
        """Back to the start, outside the timing."""
        self._state = jax.block_until_ready(self._fresh())


def _running(state: DecodeState, length: int) -> DecodeState:
    """Rows in the middle of a text that repeats with period 16, so that a lookup always finds something."""
    rows, slots = state.shape
    lengths = jnp.full((rows,), length, jnp.int32)
    tokens = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None] % 16, (rows, slots))
    drafter = state.drafter
    if hasattr(drafter, "found_B"):
        drafter = drafter._replace(found_B=jnp.full_like(drafter.found_B, 8))
    if hasattr(drafter, "length_B"):
        drafter = drafter._replace(length_B=lengths - 1)
    sampling = state.rows.sampling._replace(temperature_B=jnp.zeros((rows,), jnp.float32))
    return state._replace(
        tokens_BS=tokens,
        length_B=lengths,
        finished_B=jnp.zeros((rows,), bool),
        rows=state.rows._replace(sampling=sampling, max_length_B=jnp.full((rows,), slots - 1, jnp.int32)),
        target=state.target._replace(length_B=lengths - 1),
        drafter=drafter,
    )


def step_overhead(programs: Programs, repeats: int) -> dict[str, Any]:
    """One step over the bare target forward of the same width, by gamma bucket, one row."""
    found = {}
    window = programs.shapes.windows[0]
    for gamma in programs.shapes.gammas:
        step = Step(programs, 1, window, gamma)
        bare = Bare(programs.decoder.target, programs.params.target, 1, window, gamma + 1)

        def timed_step(step: Step = step) -> float:
            step.rewind()
            return statistics.median(seconds(step) for _ in range(5))

        def timed_bare(bare: Bare = bare) -> float:
            return statistics.median(seconds(bare) for _ in range(5))

        steps, bares = interleaved(repeats, timed_step, timed_bare)
        found[f"gamma_{gamma}"] = {
            "ratio": ratio(steps, bares),
            "step_ms": round(1e3 * statistics.median(steps), 2),
            "bare_ms": round(1e3 * statistics.median(bares), 2),
        }
    return found


def draft_step_overhead(programs: Programs, repeats: int) -> dict[str, Any]:
    """The same with a draft model in the step: over the target forward plus gamma draft passes (random weights)."""
    target = programs.decoder.target
    config = target.config
    small = define(dataclasses.replace(config, num_layers=4), target.sharding, target.dtype, target.cache_dtype)
    draft_params = random_params(small, seed=0)
    drafter = LinearDrafter(small, config.vocab_size, programs.decoder.valid_vocab)
    decoder = Decoder(target, drafter, programs.decoder.valid_vocab, programs.decoder.law)
    drafting = Programs(decoder, Params(programs.params.target, draft_params), programs.shapes)
    window, gamma = programs.shapes.windows[0], 4
    step = Step(drafting, 1, window, gamma)
    bare = Bare(target, programs.params.target, 1, window, gamma + 1)
    first, draft = (Bare(small, draft_params, 1, window, width) for width in (2, 1))

    def timed_step() -> float:
        step.rewind()
        return statistics.median(seconds(step) for _ in range(5))

    def timed_bare() -> float:
        def passes() -> None:
            bare()
            first()
            for _ in range(gamma - 1):
                draft()

        return statistics.median(seconds(passes) for _ in range(5))

    steps, bares = interleaved(repeats, timed_step, timed_bare)
    return {
        f"gamma_{gamma}": {
            "ratio": ratio(steps, bares),
            "step_ms": round(1e3 * statistics.median(steps), 2),
            "bare_ms": round(1e3 * statistics.median(bares), 2),
        }
    }


def first_token(engine: Engine, programs: Programs, repeats: int) -> dict[str, Any]:
    """TTFT of an engine request over one bare prefill of the same bucket."""
    found = {}
    for chunk in programs.shapes.chunks:
        window = programs.shapes.window(chunk + 9)
        bare = Bare(programs.decoder.target, programs.params.target, 1, window, chunk)
        ids = [1 + i % 1000 for i in range(chunk)]

        def ttft(ids: list[int] = ids) -> float:
            done = Completion.of(engine.generate(ids, SamplingParams(max_tokens=1, temperature=0.0)))
            return (done.summary.timing.ttft_ms or 0.0) / 1e3

        times, bares = interleaved(repeats, ttft, lambda bare=bare: seconds(bare))
        found[f"prompt_{chunk}"] = {
            "ratio": ratio(times, bares),
            "ttft_ms": round(1e3 * statistics.median(times), 1),
            "bare_ms": round(1e3 * statistics.median(bares), 1),
        }
    return found


def host_share(engine: Engine, programs: Programs, repeats: int) -> dict[str, Any]:
    """What the host adds to a plain step: the engine's time per token over the bare step's, one request."""
    window = programs.shapes.windows[0]
    step = Step(programs, 1, window, 0)
    sampling = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)

    def tpot() -> float:
        ids = [1 + i % 1000 for i in range(100)]
        done = Completion.of(engine.generate(ids, sampling, SpeculationParams(0)))
        return (done.summary.timing.tpot_ms or 0.0) / 1e3

    def one_step() -> float:
        step.rewind()
        return statistics.median(seconds(step) for _ in range(20))

    tpots, steps = interleaved(repeats, tpot, one_step)
    return {
        "ratio": ratio(tpots, steps),
        "host_ms_per_step": round(1e3 * (statistics.median(tpots) - statistics.median(steps)), 3),
    }


def ready(model: Path) -> dict[str, float]:
    """Seconds from starting Python to a warm engine: with an empty compilation cache, then with a full one."""
    code = (
        "import sys; from jaxspec.engine.engine import Engine; "
        f"e = Engine.load(sys.argv[1], max_slots={SLOTS}, max_len={LENGTH}, compilation_cache=sys.argv[2]); "
        "e.warmup(); print('ready', flush=True); e.close()"
    )

    def until_ready(cache: str) -> float:
        command = [sys.executable, "-c", code, str(model), cache]
        start = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            line = child.stdout.readline() if child.stdout else ""
            elapsed = time.perf_counter() - start
        if line != "ready\n" or child.returncode:
            raise RuntimeError(f"the engine did not become ready (status {child.returncode})")
        return elapsed

    with tempfile.TemporaryDirectory() as cache:
        cold, warm = until_ready(cache), until_ready(cache)
    return {"cold_s": round(cold, 1), "warm_s": round(warm, 1)}


def provenance(engine: Engine) -> dict[str, Any]:
    """Where the figures came from."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    packages = ("jaxspec", "jax", "jaxlib", "flax", "numpy")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "dtype": engine.model_info().dtype,
        "mesh": dict(engine.server_info().mesh),
    }


def table(console: Console, title: str, rows: dict[str, Any], goal: str) -> None:
    """One block of figures."""
    shown = Table(title=f"{title}   (goal: {goal})", title_justify="left")
    names = list(dict.fromkeys(name for figures in rows.values() for name in figures))
    for name in ("", *names):
        shown.add_column(name)
    for row, figures in rows.items():
        cells = [figures.get(name, "") for name in names]
        shown.add_row(row, *(_shown(cell) for cell in cells))
    console.print(shown)


def _shown(cell: Any) -> str:
    return f"{cell['median']} ({cell['min']}..{cell['max']})" if isinstance(cell, dict) else str(cell)


def main() -> int:
    """Runs everything; ``--only`` picks parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of every comparison (medians)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--only", nargs="*", choices=("ready", "speed", "step", "first_token", "host"))
    options = parser.parse_args()
    wanted = set(options.only or ("ready", "speed", "step", "first_token", "host"))
    console = Console()
    cache = ROOT / ".cache" / "xla"
    figures: dict[str, Any] = {}
    if "ready" in wanted:
        figures["ready"] = ready(options.model)
        table(console, "Seconds to ready", {"server of the demo": figures["ready"]}, "60 cold, 15 warm")
    with Engine.load(
        options.model, max_slots=SLOTS, max_len=LENGTH, dtype=options.dtype, compilation_cache=cache
    ) as engine:
        figures["provenance"] = provenance(engine)
        engine.warmup()
        programs = engine.programs
        if "speed" in wanted:
            prompts = [*demo_prompts(), DemoPrompt("prose", "", PROSE, max_tokens=192)]
            figures["speed"] = {prompt.name: speed(engine, prompt, options.repeats) for prompt in prompts}
            table(console, "n-gram speculation over plain", figures["speed"], "edit 2.5, chat and prose 0.95")
        if "step" in wanted:
            figures["step"] = step_overhead(programs, 2 * options.repeats + 1)
            figures["step"]["draft_model"] = draft_step_overhead(programs, 2 * options.repeats + 1)["gamma_4"]
            table(console, "Step over bare forward", figures["step"], "1.10")
        if "first_token" in wanted:
            figures["first_token"] = first_token(engine, programs, 2 * options.repeats + 1)
            table(console, "TTFT over bare prefill", figures["first_token"], "1.15")
        if "host" in wanted:
            figures["host"] = {"plain": host_share(engine, programs, options.repeats)}
            table(console, "Engine's time per token over the step's", figures["host"], "none stated")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
