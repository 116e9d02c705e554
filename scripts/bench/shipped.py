"""The shipped heads against lookup, their hybrid, and plain decoding, question by question of Spec-Bench.

All engines are loaded at once and take turns on each question, one request at a time, so that a slow minute of the
machine hits all of them. The interval is a bootstrap over questions (Efron 1979): other questions, other texts.
"""

import contextlib
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxspec import Completion, Engine, Prompt, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.errors import UserError
from scripts.bench.drafters import LENGTH, Sample, measure
from scripts.bench.serving import ROOT
from scripts.shipped import TREE, shipped_heads

RESAMPLES: Final = 2000
METHODS: Final = {
    "ngram": {"method": "ngram"},
    "eagle3": {"method": "eagle3", **TREE},
    "hybrid": {"method": "hybrid", **TREE},
}


def shipped_speed(target: Path, sample: Sample, dtype: str, tokens: int, temperature: float) -> dict[str, Any]:
    """Speed over plain decoding of the whole sample, and of the hybrid over each alone, with 95 % intervals."""
    heads = shipped_heads(target).get("eagle3")
    if heads is None:
        raise UserError(f"{target}: expected the model that assets/ has an EAGLE-3 head for")
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", *METHODS)}
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine.load(
                    target,
                    heads=heads,
                    speculation=SpeculationConfig(**given),
                    dtype=dtype,
                    mesh="1",
                    max_slots=1,
                    max_len=LENGTH,
                    compilation_cache=ROOT / ".cache" / "xla",
                )
            )
            for name, given in METHODS.items()
        }
        for engine in engines.values():
            measure(engine, sample, temperature, tokens)  # compiles what these questions need
        for index, (_, text) in enumerate(sample.questions):
            sampling = SamplingParams(max_tokens=tokens, temperature=temperature, seed=index, ignore_eos=True)
            prompt = Prompt(chat=(("user", text),))
            for name in seconds:
                engine = engines["hybrid" if name == "plain" else name]
                speculation = SpeculationParams(0 if name == "plain" else None)
                done = Completion.of(engine.generate(prompt, sampling, speculation))
                seconds[name].append((done.summary.timing.tpot_ms or 0.0) * (len(done.token_ids) - 1) / 1e3)
    pairs = [(name, "plain") for name in METHODS] + [("hybrid", "ngram"), ("hybrid", "eagle3")]
    return {f"{one} over {two}": _ratio(seconds[two], seconds[one]) for one, two in pairs}


def _ratio(upper: list[float], lower: list[float]) -> dict[str, float]:
    """Of the sums, and where 95 % of the ratios lie when the questions are drawn again."""
    above, below = np.array(upper), np.array(lower)
    drawn = np.random.default_rng(0).integers(0, len(above), (RESAMPLES, len(above)))
    ratios = above[drawn].sum(axis=1) / below[drawn].sum(axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return {
        "median": round(float(above.sum() / below.sum()), 3),
        "min": round(float(low), 3),
        "max": round(float(high), 3),
    }
