"""Medusa trees whose children are drawn: what is drawn, from which law, and the text that comes of it."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import SamplingParams, SpeculationConfig
from jaxspec.engine.load import load
from jaxspec.speculate.drafters.medusa import MedusaState
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.sampling import RowSampling
from jaxspec.speculate.state import Context
from tests.engine.conftest import Job, Rig, greedy
from tests.engine.laws import Ranks
from tests.engine.reference import Reference
from tests.speculate.oracle import assert_follows, sorted_law


@dataclasses.dataclass(frozen=True)
class FirstHead:
    """The law that a round's first drafts are drawn from, in float64; ``logits[t]`` is about token t + 1."""

    target: Reference
    weights: dict[str, np.ndarray]

    def logits(self, tokens_BT) -> np.ndarray:
        x = self.target.hidden(tokens_BT)
        y = x @ self.weights["0.0.linear.weight"].T + self.weights["0.0.linear.bias"]
        logits = (x + y / (1 + np.exp(-y))) @ self.weights["0.1.weight"].T
        # Seen from the token before the pending one.
        return np.pad(logits[:, :-1], ((0, 0), (1, 0), (0, 0)))


@pytest.fixture(scope="module")
def drawn(heads_rig, shared) -> Callable[[str], Rig]:
    weights = load_file(shared / "fixtures" / "medusa" / "medusa_lm_head.safetensors")
    weights = {name: x.astype(np.float64) for name, x in weights.items()}

    def rig(law: str) -> Rig:
        made = heads_rig("medusa", rejection_sample_method=law, draft_sample_method="probabilistic")
        return dataclasses.replace(made, draft=FirstHead(made.reference, weights))

    return rig


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_what_is_drawn_and_from_which_law(temperature, top_p, checkpoints, heads_folders, shared):
    """3,000 seeds after one prompt, and a greedy row among them.

    The laws reported are those of the depths; chi-square of first children, of pairs of siblings, and of the first
    children of two cousins, which must be independent. False-alarm rate 1e-6 each.
    """
    config = SpeculationConfig(method="medusa", draft_sample_method="probabilistic")
    options = {"mesh": "1", "dtype": None, "max_slots": 2, "max_len": 61}
    loaded = load(checkpoints("tiny-llama3"), draft=None, heads=heads_folders("medusa"), speculation=config, **options)
    decoder, params = loaded.programs.decoder, loaded.programs.params
    drafter, tree = decoder.drafter, decoder.drafter.tree  # pyright: ignore
    rows, greedy_row = 3001, 1234
    base, found = (np.load(shared / "fixtures" / name / "goldens.npz") for name in ("tiny-llama3", "medusa"))
    hidden_D, logits_MV = base["p7__final_norm"][-1], found["p7__medusa_logits"][:, -1]

    temperature_B = jnp.full((rows,), temperature).at[greedy_row].set(0)
    nothing_B = jnp.zeros((rows,))
    sampling = RowSampling(temperature_B, nothing_B.astype(jnp.int32), jnp.full((rows,), top_p), nothing_B)
    seed_B2 = jnp.stack([jnp.arange(rows, dtype=jnp.uint32), jnp.full((rows,), 9, jnp.uint32)], axis=1)
    length_B = jnp.full((rows,), 8, jnp.int32)
    empty = decoder.empty(rows, 61)
    context = Context(empty.tokens_BS, length_B, empty.rows._replace(sampling=sampling, seed_B2=seed_B2))
    state = MedusaState(jnp.broadcast_to(jnp.asarray(hidden_D)[None], (rows, hidden_D.size)), jnp.ones((rows,), bool))

    @jax.jit
    def propose(params, context):
        target = decoder.target.merge(params.target)
        draws = Draws(seed_B2, length_B, coupled=False)
        return drafter.propose(params.drafter, target, state, context, tree.depth, draws)[0]

    proposal = propose(params, context)
    tokens_BJ, q_BDV, law_BJ = (np.asarray(x) for x in (proposal.tokens_BJ, proposal.q_BJV, proposal.law_BJ))
    others = np.arange(rows) != greedy_row
    q_DV = np.array([sorted_law(logits_V, temperature, top_p=top_p) for logits_V in logits_MV[: tree.depth]])
    np.testing.assert_allclose(q_BDV[others], np.broadcast_to(q_DV, (rows - 1, *q_DV.shape)), atol=1e-5)
    assert (law_BJ == np.array(tree.depths) - 1).all()
    likeliest = [int(np.argsort(-logits_MV[d - 1])[r]) for d, r in zip(tree.depths, tree.ranks, strict=True)]
    assert tokens_BJ[greedy_row].tolist() == likeliest
    assert (q_BDV[greedy_row] > 0).all()

    tokens_BJ, vocab = tokens_BJ[others], q_DV.shape[1]
    nodes = {path: j for j, path in enumerate(tree.choices)}

    def pairs(one, other):
        return np.bincount(tokens_BJ[:, nodes[one]] * vocab + tokens_BJ[:, nodes[other]], minlength=vocab**2)

    for path in ((0,), (0, 0), (1, 0), (0, 0, 0)):
        assert_follows(np.bincount(tokens_BJ[:, nodes[path]], minlength=vocab), q_DV[len(path) - 1])
    second_VV = q_DV[0][:, None] * q_DV[0][None, :] / (1 - q_DV[0])[:, None]
    assert_follows(pairs((0,), (1,)), second_VV * (1 - np.eye(vocab)))
    assert_follows(pairs((0, 0), (1, 0)), np.outer(q_DV[1], q_DV[1]))


def test_greedy_text_is_the_reference_text(drawn, goldens):
    """All levels of the tree, alone and beside sampled rows; a greedy row drafts the likeliest tokens."""
    rig = drawn("block")
    jobs = []
    for seed, (name, golden) in enumerate(goldens.items()):
        done = rig.run(golden.ids, greedy(64))
        assert list(done.token_ids) == golden.greedy, name
        assert done.summary.speculation.num_accepted_draft_tokens > 0
        sampling = SamplingParams(max_tokens=23, temperature=0.9, seed=seed, ignore_eos=True)
        jobs += [Job(golden.ids, greedy(64)), Job(golden.ids, sampling, 4), Job(golden.ids, sampling, 2)]
    alone = [rig.run(*job) for job in jobs]
    for one, other in zip(alone, rig.run_all(jobs), strict=True):
        assert one.token_ids == other.token_ids
        assert one.summary.speculation == other.summary.speculation
    rig.assert_idle()


# Both laws under both options: tests/lossless, with a vocabulary of 16.
@pytest.mark.parametrize(
    ("law", "options"), [("token", {"temperature": 1.0}), ("block", {"temperature": 0.7, "top_p": 0.9})]
)
def test_sampled_text_follows_the_target(drawn, goldens, law, options):
    """Ranked by how much the first head favours a token; the false-alarm rate is that of test_law.py.

    Whether block reaches an offset says something of the tokens before it, so there all tokens are taken together.
    """
    rig = drawn(law)
    jobs = []
    for golden in (goldens[name] for name in ("p1", "p7", "p33")):
        for n in range(63):
            sampling = SamplingParams(max_tokens=10, seed=n, ignore_eos=True, **options)
            jobs.append(Job([*golden.ids, *golden.greedy[:n]], sampling))
    ranks = Ranks(rig, jobs, rig.chunks(jobs))
    if law == "token":
        for offset, at_least in ((0, 900), (1, 40)):
            ranks.assert_uniform(offset, at_least)
    ranks.assert_uniform("all", 1500)
    assert abs(ranks.z) < 5


def test_heads_that_are_asked_for_likeliest_tokens_say_no_law(checkpoints, heads_folders):
    """draft_sample_method: its default for trees, and what cannot be drawn."""
    for method, values, sample in (
        ("medusa", {"draft_sample_method": "greedy", "rejection_sample_method": "coupled"}, "greedy"),
        ("medusa", {"rejection_sample_method": "coupled"}, "probabilistic"),
        ("eagle", {}, "greedy"),
        ("eagle", {"tree_topk": 1}, "probabilistic"),
        ("eagle", {"tree_topk": 1, "draft_sample_method": "greedy"}, "greedy"),
    ):
        loaded = load(
            checkpoints("tiny-llama3"),
            draft=None,
            heads=heads_folders({"eagle": "eagle1"}.get(method, method)),
            speculation=SpeculationConfig(method=method, **values),
            mesh="1",
            dtype=None,
            max_slots=2,
            max_len=61,
        )
        assert loaded.programs.decoder.drafter.sample == sample  # pyright: ignore
