"""Deterministic mode: ids and log-probabilities are equal to the last bit, however a request is decoded.

Log-probabilities are compared as floats, exactly: they move with the bits of the logits, ids at near-ties alone.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jaxspec import Completion, Engine, SamplingParams, SpeculationConfig
from tests.engine.conftest import WIDE_MAX_LEN, Job, Rig, greedy

SLOTS = 3
# One window of 300 slots. A prompt of 150 is cut into 64, 64 and 22 also where a free engine would take it whole.
MODE = {"deterministic": True, "max_slots": SLOTS, "max_len": WIDE_MAX_LEN, "warm": False}
TREES = {8: "2,2;1,1,1,1"}  # by the nodes below the root; 63: the authors'


def same(done: Completion, other: Completion) -> None:
    assert done.token_ids == other.token_ids
    assert done.logprobs == other.logprobs


def greedy_jobs(goldens, gamma: int | None) -> list[Job]:
    """Prompts of every kind of chunk; two more than there are slots."""
    names = ("p150", "p7", "p33", "p1", "p150")
    return [Job(goldens[name].ids, greedy(25 - 3 * i, logprobs=8), gamma) for i, name in enumerate(names)]


def every_way(rig: Rig, jobs: Sequence[Job]) -> int:
    """Decodes each job without speculation, then with it, alone and in batches; counts accepted drafts.

    In each batch a job meets other neighbours, slots and gammas, and prompts arrive while rows decode.
    """
    plain = [rig.run(*job._replace(gamma=0)) for job in jobs]
    alone = [rig.run(*job._replace(gamma=8)) for job in jobs]
    for done, expected in zip(alone, plain, strict=True):
        same(done, expected)
    mixed = [job._replace(gamma=(0, 8, 3)[i % 3]) for i, job in enumerate((*jobs, *jobs[::-1]))]
    with rig.watch.recording() as steps:
        together = rig.run_all(mixed)
    for done, expected in zip(together, (*plain, *plain[::-1]), strict=True):
        same(done, expected)
    assert any(len(rows) == SLOTS for rows in steps)
    return sum(done.summary.speculation.num_accepted_draft_tokens for done in alone)


@pytest.fixture(scope="module")
def chain(make_rig) -> Callable[[str, str], Rig]:
    """``chain(method, dtype)``: an engine whose drafts are chains."""
    rigs: dict[tuple[str, str], Rig] = {}

    def make(method: str, dtype: str = "float32") -> Rig:
        if (method, dtype) not in rigs:
            options = {"draft": "near"} if method == "draft_model" else {"method": method, "target": "loop"}
            options["law"] = "coupled" if dtype == "float32" else "block"
            rigs[method, dtype] = make_rig(**options, dtype=dtype, **MODE)
        return rigs[method, dtype]

    return make


# Copies in bfloat16 differ from these in nothing that rounds.
@pytest.mark.parametrize(
    ("method", "dtype"), [("ngram", "float32"), ("draft_model", "float32"), ("draft_model", "bfloat16")]
)
def test_chains_change_no_bit(method, dtype, chain, goldens):
    """A23: greedy text and log-probabilities without speculation, with it, alone, in a batch and in any slot."""
    assert every_way(chain(method, dtype), greedy_jobs(goldens, 0)) > 10


@pytest.mark.parametrize(("drafts", "dtype"), [(8, "float32"), (63, "float32"), (8, "bfloat16")])
def test_trees_change_no_bit(drafts, dtype, heads_rig, goldens, shared):
    """A26: whatever the tree, the text is that of decoding without one; in float32 it is the reference's, too."""
    choices = TREES.get(drafts)
    if choices is None:
        paths = np.load(shared / "fixtures" / "medusa" / "goldens.npz")["buffers__choices"]
        choices = [[int(rank) for rank in path if rank >= 0] for path in paths]
    rig = heads_rig("medusa", {"deterministic": True, "dtype": dtype, "max_len": WIDE_MAX_LEN}, tree_choices=choices)
    assert rig.engine.programs.decoder.drafter.drafts(8) == drafts
    assert every_way(rig, greedy_jobs(goldens, 0)) > 10
    if dtype == "float32":
        assert list(rig.run(goldens["p7"].ids, greedy(40), 8).token_ids) == goldens["p7"].greedy[:40]


def test_dynamic_trees_change_no_bit(heads_rig, goldens):
    """The nodes of a path lie elsewhere in each round."""
    rig = heads_rig("eagle1", {"deterministic": True, "max_len": WIDE_MAX_LEN}, tree_nodes=12)
    assert every_way(rig, greedy_jobs(goldens, 0)) > 10


def test_a_window_beside_the_drafts_changes_no_bit(chain, goldens):
    """Lookahead: the pass of a plain request carries a window, too, and nothing of it is seen."""
    assert every_way(chain("lookahead", "float32"), greedy_jobs(goldens, 0)) > 10


def test_copies_and_trees_in_one_step_change_no_bit(heads_rig, goldens):
    """Hybrid: prompts that say everything twice are copied from while others draft trees."""
    rig = heads_rig("eagle1", {"deterministic": True, "max_len": WIDE_MAX_LEN}, method="hybrid", tree_nodes=12)
    jobs = [job._replace(prompt=job.prompt[:60] * (1 + i % 2)) for i, job in enumerate(greedy_jobs(goldens, 0))]
    assert every_way(rig, jobs) > 10


def test_a_seed_gives_the_same_text_under_the_coupled_law(chain, goldens):
    """Temperature, top-p edges and noise hang on the last bits, too."""
    rig = chain("draft_model", "float32")
    heat = (0.1, 0.5, 0.7, 1.0, 1.5)
    jobs = [
        job._replace(sampling=dataclasses.replace(job.sampling, temperature=heat[i], top_p=0.9, seed=i))
        for i, job in enumerate(greedy_jobs(goldens, 0))
    ]
    assert every_way(rig, jobs) > 5


def test_a_seed_gives_the_same_text_in_company_under_any_law(chain, goldens):
    """Under a law that looks at the drafts the text depends on gamma, and on nothing else."""
    rig = chain("draft_model", "bfloat16")
    sampling = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, ignore_eos=True, logprobs=8)
    jobs = [
        Job(job.prompt, dataclasses.replace(sampling, seed=i), (8, 4, 1)[i % 3])
        for i, job in enumerate(greedy_jobs(goldens, 0))
    ]
    alone = [rig.run(*job) for job in jobs]
    for order in ((0, 1, 2, 3, 4), (3, 1, 4, 0, 2)):
        together = rig.run_all([jobs[i] for i in order])
        for place, i in enumerate(order):
            same(together[place], alone[i])
    assert len({done.token_ids for done in alone}) == 5


def test_every_step_has_one_shape_and_says_so(chain, goldens, compilations):
    rig = chain("ngram", "float32")
    shapes = rig.engine.programs.shapes
    assert shapes == ((SLOTS,), (WIDE_MAX_LEN,), (16, 64), (8,))
    assert rig.engine.server_info().deterministic
    rig.engine.warmup()
    with compilations() as seen:
        rig.run_all(greedy_jobs(goldens, None))
        rig.run(*greedy_jobs(goldens, 0)[0])
    assert seen.names == []


def test_a_plain_server_can_have_the_shape_of_a_speculating_one(chain, goldens):
    """Method none takes the width of num_speculative_tokens, so that its text is comparable to the last bit."""
    speculating = chain("ngram", "float32")
    plain = chain("none", "float32")
    assert plain.engine.programs.shapes.gammas == (8,)
    for job in greedy_jobs(goldens, 8)[:2]:
        done = plain.run(*job)
        assert set(done.origins) == {"plain"}
        same(done, speculating.run(*job))


def test_a_plain_server_of_width_one_decodes_alone_as_in_a_batch(checkpoints, goldens):
    """A product of one row and one of three round differently."""
    config = SpeculationConfig(method="none", num_speculative_tokens=0)
    options = {"max_slots": SLOTS, "max_len": WIDE_MAX_LEN, "mesh": "1", "deterministic": True}
    jobs = greedy_jobs(goldens, 0)[1:4]
    with Engine.load(checkpoints("loop"), speculation=config, **options) as engine:
        assert engine.programs.shapes.gammas == (0,)
        alone = [Completion.of(engine.generate(job.prompt, job.sampling)) for job in jobs]
        together = [engine.generate(job.prompt, job.sampling) for job in jobs]
        for stream, expected in zip(together, alone, strict=True):
            same(Completion.of(stream), expected)
