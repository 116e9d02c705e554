"""What is asked of every engine of the matrix, and the plain texts that it must give."""

from typing import NamedTuple

import numpy as np

from jaxspec import SamplingParams
from tests.engine.conftest import Job
from tests.lossless.cases import LEVELS, MAX_LEN, SmallRig

SAMPLED = {"t1": {"temperature": 1.0}, "t0.7-top_p0.9": {"temperature": 0.7, "top_p": 0.9}}
JOINT = 80  # requests of a chi-square
ALONE = 5  # of them, that are repeated alone


class Texts(NamedTuple):
    """Without speculation, by the jobs below."""

    greedy: list[tuple[int, ...]]
    sampled: dict[str, list[tuple[int, ...]]]

    @classmethod
    def of(cls, rig: SmallRig) -> "Texts":
        greedy = [done.token_ids for done in rig.run_all(greedy_jobs())]
        return cls(greedy, {name: [done.token_ids for done in rig.run_all(sampled_jobs(name))] for name in SAMPLED})


def jobs(count: int, **options: float) -> list[Job]:
    """Prompts of 1 to 20 tokens (a chunk, its edge, and more), each text as long as the context lets it be."""
    rng = np.random.default_rng(11)
    made = []
    for seed in range(count):
        sampling = SamplingParams(max_tokens=MAX_LEN, seed=seed, ignore_eos=True, **options)  # pyright: ignore
        made.append(Job(rng.integers(0, 16, size=1 + seed % 20).tolist(), sampling, 1 + seed % LEVELS))
    return made


def greedy_jobs() -> list[Job]:
    return jobs(24, temperature=0.0)


def sampled_jobs(options: str) -> list[Job]:
    return jobs(JOINT, **SAMPLED[options])
