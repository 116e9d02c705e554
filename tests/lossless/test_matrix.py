"""Every drafter under every law on the running engine: text does not depend on it, and follows the target's law.

Lengths of all caches are checked after each step by the watch (tests/engine/watch.py), and that nothing compiles by the
``rig`` fixture, so both hold in every test of this folder.
"""

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.engine.conftest import Job
from tests.lossless.conftest import CASES, LEVELS, MAX_LEN, PLAIN, Case, SmallRig
from tests.lossless.exact import Ranks

OPTIONS = {"t1": {"temperature": 1.0}, "t0.7-top_p0.9": {"temperature": 0.7, "top_p": 0.9}}
JOINT = 64  # requests of a chi-square
ALONE = 6  # of them, that are repeated alone

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 20 tokens: a chunk, its edge, and more."""
    rng = np.random.default_rng(11)
    return [rng.integers(0, 16, size=1 + i % 20).tolist() for i in range(count)]


def jobs(count: int, **options: float) -> list[Job]:
    """The text of each request is as long as the context lets it be."""
    sampling = {"ignore_eos": True, **options}
    return [
        Job(prompt, SamplingParams(max_tokens=MAX_LEN, seed=seed, **sampling), LEVELS - seed % 2)  # pyright: ignore
        for seed, prompt in enumerate(prompts(count))
    ]
