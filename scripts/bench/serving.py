"""What a user of the engine sees: decoding speed, time to the first token, time until ready."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxspec import Completion, SamplingParams, SpeculationParams
from jaxspec.engine.engine import Engine
from jaxspec.speculate.programs import Programs
from scripts.bench.passes import Bare, Step
from scripts.bench.timing import interleaved, ratio, seconds
from scripts.demo_prompts import DemoPrompt

ROOT = Path(__file__).resolve().parent.parent.parent
SLOTS, LENGTH = 4, 1024  # what the demo serves with


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
