"""Nothing compiles once an engine is warm, whatever a request asks for."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxspec import Prompt, SamplingParams
from jaxspec.shapes import GAMMA_BUCKETS, GAMMA_MAX
from tests.engine.conftest import LOOKUP_MAX, LOOKUP_MIN, Job, Rig


def every_kind(max_len: int) -> list[Job]:
    """Every option at an ordinary and at an extreme value, every gamma, prompts of every chunk and window."""
    rng = np.random.default_rng(0)
    base = SamplingParams(max_tokens=9, seed=1)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 100.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 200},
        {"top_k": 2**40},
        {"top_p": 0.01},
        {"top_p": 0.999},
        {"min_p": 0.3},
        {"top_k": 100, "top_p": 0.5, "min_p": 0.01, "temperature": 0.5},
        {"logprobs": 0},
        {"logprobs": 8, "temperature": 0.0},
        {"logprobs": 3, "top_p": 0.9},
        {"stop": ("e", "the ", "\N{SNOWMAN}")},
        {"stop_token_ids": tuple(range(16)), "min_tokens": 5},
        {"ignore_eos": True, "min_tokens": 9},
        {"seed": None},
        {"seed": 2**64 - 1},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"skip_special_tokens": False},
    ]
    sizes = [size for size in (1, 2, 15, 16, 17, 33, 64, 65, 100, 130, 200) if size < max_len - 9]
    gammas = itertools.cycle((None, 0, 1, 2, 3, 4, 5, 6, 7, 8))
    lengths = itertools.cycle(sizes)
    jobs = [
        Job(rng.integers(0, 490, size=next(lengths)).tolist(), dataclasses.replace(base, **kind), next(gammas))
        for kind in kinds
    ]
    return [
        *jobs,
        Job(rng.integers(0, 490, size=max_len - 1).tolist(), base),
        *(job._replace(gamma=8) for job in jobs[:3]),
    ]


@pytest.mark.parametrize("drafter", ["ngram", "near_draft", "plain"])
def test_nothing_compiles_after_warming_up(drafter, request, compilations):
    """F12, F13, F15, F19: alone, two by two and all together, cancelled ones too; a context that is no power of two."""
    rig: Rig = request.getfixturevalue(drafter)
    info = rig.engine.server_info()
    jobs = every_kind(info.max_len)
    looked_up = (LOOKUP_MAX, LOOKUP_MIN) if info.method == "ngram" else (None, None)
    assert (info.prompt_lookup_max, info.prompt_lookup_min) == looked_up
    with compilations() as seen:
        for job in jobs:
            rig.run(*job)
        for pair in (
            itertools.batched(jobs, 2) if hasattr(itertools, "batched") else zip(jobs[::2], jobs[1::2], strict=False)
        ):
            rig.run_all(pair)
        width = info.max_slots + info.max_queue if info.max_queue < len(jobs) else len(jobs)
        for start in range(0, len(jobs), width):
            streams = [rig.start(job) for job in jobs[start : start + width]]
            for index, stream in enumerate(streams):
                if index % 4 == 1:
                    next(stream)
                    stream.close()  # pyright: ignore
            for index, stream in enumerate(streams):
                if index % 4 != 1:
                    list(stream)
        list(rig.engine.generate(Prompt(text="the quick brown fox"), SamplingParams(max_tokens=3)))
        list(rig.engine.generate(Prompt(chat=(("user", "hi"),)), SamplingParams(max_tokens=3)))
        rig.engine.loads()
        rig.engine.server_info()
    assert seen.names == []
    assert rig.engine.ready


def test_the_largest_buckets_are_the_limits_themselves(ngram):
    """F13: a context of 240 has a window of 240, not of 256."""
    shapes = ngram.engine.programs.shapes
    assert shapes.windows[-1] == ngram.engine.server_info().max_len
    assert shapes.rows == (1, ngram.engine.server_info().max_slots)
    assert set(shapes.gammas) <= set(GAMMA_BUCKETS)
    assert [shapes.window(n) for n in (1, 239, 240)] == [240] * 3
    for gamma in range(GAMMA_MAX + 1):
        assert shapes.gamma(gamma) == min(bucket for bucket in shapes.gammas if bucket >= gamma)
    assert [shapes.chunk(n, 64) for n in (1, 16, 17, 64, 65, 200)] == [16, 16, 64, 64, 64, 64]
