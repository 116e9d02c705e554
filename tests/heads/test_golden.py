"""Outputs against the authors' code, through heads converted from the authors' own files, on one device and on four."""

import jax
import numpy as np
import pytest

from jaxspec.model.heads.config import EagleConfig

MESHES = ("1", "4", "data=2,model=2")
# Max abs, float32, on hidden states and logits. Measured where this was written, without XLA's optimisations: Medusa
# 1.7e-5; EAGLE-1 1.1e-5 in the prefill, 9.3e-5 after three steps on its own outputs (logits); EAGLE-3 9e-6.
TOLERANCE = 2e-4
PROMPTS = ("p7", "p33")


def worst(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape
    return float(np.max(np.abs(got - expected)))


@pytest.mark.parametrize("mesh", MESHES)
def test_medusa_logits(running, shared, mesh) -> None:
    """All five heads on the base's hidden states after its final norm, every golden prompt."""
    found = np.load(shared / "fixtures/medusa/goldens.npz")
    base = np.load(shared / "fixtures/tiny-llama3/goldens.npz")
    heads = running("medusa", mesh)
    assert heads.definition.config.num_heads == 5  # config.json of other uploads says 2: the file is counted
    for prompt, key in (("p1", ""), ("p7", ""), ("p33", "_last8"), ("p150", "_last")):
        expected = found[f"{prompt}__medusa_logits{key}"]
        expected = expected[:, None] if expected.ndim == 2 else expected
        hidden = base[f"{prompt}__final_norm"]
        logits = heads.medusa(np.stack([hidden, hidden]))
        assert logits.shape == (5, 2, len(hidden), 512)
        for row in range(2):
            assert worst(logits[:, row, -expected.shape[1] :], expected) <= TOLERANCE


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_eagle_prefill_and_three_steps_on_its_own_outputs(running, shared, name, mesh) -> None:
    """Two prompts of unequal length in one batch, each row at its own positions; then three greedy steps."""
    found = np.load(shared / f"fixtures/{name}/goldens.npz")
    features_key, logits_key = ("features", "logits") if name == "eagle1" else ("aux", "draft_logits")
    heads = running(name, mesh)
    lengths = [len(found[f"{prompt}__ids"]) for prompt in PROMPTS]
    longest, slots = max(lengths), 41
    width = found[f"p7__{features_key}"].shape[-1]
    # What padding holds must not matter; a position past the cache writes nothing.
    tokens = np.full((2, longest), -7, np.int32)
    features = np.full((2, longest, width), 1e3, np.float32)
    positions = np.full((2, longest), slots, np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : lengths[row]] = found[f"{prompt}__ids"]
        features[row, : lengths[row]] = found[f"{prompt}__{features_key}"]
        positions[row, : lengths[row]] = np.arange(lengths[row])
    hidden, logits, cache = heads.eagle(tokens, features, positions, heads.cache(2, slots))
    for row, prompt in enumerate(PROMPTS):
        assert worst(hidden[row, : lengths[row]], found[f"{prompt}__out_hidden"]) <= TOLERANCE
        assert worst(logits[row, : lengths[row]], found[f"{prompt}__{logits_key}"]) <= TOLERANCE
    last = np.stack([hidden[row, length - 1] for row, length in enumerate(lengths)])[:, None]
    judged = np.stack([logits[row, length - 1] for row, length in enumerate(lengths)])
    for step in (1, 2, 3):
        keys = [f"{prompt}__step{step}" for prompt in PROMPTS]
        ids = np.concatenate([found[f"{key}__id"] for key in keys])
        assert to_target(heads, judged.argmax(-1)).tolist() == ids.tolist()
        where = np.stack([found[f"{key}__position"] for key in keys])
        hidden, logits, cache = heads.eagle(ids[:, None], last, where, cache)
        for row, key in enumerate(keys):
            assert worst(hidden[row], found[f"{key}__out_hidden"]) <= TOLERANCE
            assert worst(logits[row], found[f"{key}__{logits_key}"]) <= TOLERANCE
        last, judged = hidden, logits[:, 0]


def to_target(heads, draft_ids) -> np.ndarray:
    return np.asarray(jax.jit(lambda params: heads.definition.merge(params).to_target(draft_ids))(heads.params))


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(running, shared, name) -> None:
    found = np.load(shared / f"fixtures/{name}/goldens.npz")
    heads = running(name, "1")
    ids, features = found["p33__ids"], found["p33__features" if name == "eagle1" else "p33__aux"]
    cache, parts = heads.cache(1, 37), []
    for start in range(0, 33, 11):
        part = slice(start, start + 11)
        hidden, _, cache = heads.eagle(ids[None, part], features[None, part], np.arange(33)[None, part], cache)
        parts.append(hidden[0])
    assert worst(np.concatenate(parts), found["p33__out_hidden"]) <= TOLERANCE


def test_eagle3_fuses_three_levels_and_takes_its_own_outputs_as_they_are(running, shared) -> None:
    found = np.load(shared / "fixtures/eagle3/goldens.npz")
    heads = running("eagle3", "1")
    fuse = jax.jit(lambda params, aux: heads.definition.merge(params).fused(aux))
    fused = np.asarray(fuse(heads.params, found["p33__aux"][None]))
    assert worst(fused[0], found["p33__fc_out"]) <= TOLERANCE
    # Already of the head's width: not fused again, so both ways in give the same.
    inputs = found["p33__ids"][None], np.arange(33)[None]
    once, _, _ = heads.eagle(inputs[0], found["p33__aux"][None], inputs[1], heads.cache(1, 37))
    again, _, _ = heads.eagle(inputs[0], fused, inputs[1], heads.cache(1, 37))
    assert worst(again, once) <= 1e-6


def test_eagle3_s_draft_vocabulary_in_the_target_s(running, shared) -> None:
    """target = draft + d2t: the 128 tokens that the fixture's head was trained on; elsewhere no probability."""
    found = np.load(shared / "fixtures/eagle3/goldens.npz")
    heads = running("eagle3", "4")
    used = found["used_tokens"]
    assert to_target(heads, np.arange(128)).tolist() == used.tolist()
    spread = jax.jit(lambda params, logits: heads.definition.merge(params).over_target_vocab(logits))
    whole = np.asarray(spread(heads.params, found["p33__draft_logits"][None]))
    assert whole.shape == (1, 33, 512)
    np.testing.assert_array_equal(whole[0][:, used], found["p33__draft_logits"])
    others = np.setdiff1d(np.arange(512), used)
    assert np.all(np.isneginf(whole[0][:, others]))


def test_what_the_fixtures_prove_about_the_heads(running) -> None:
    """Facts that no flag of the files says: see the formats' notes on draft heads."""
    eagle1, eagle3 = (running(name, "1").definition.config for name in ("eagle1", "eagle3"))
    assert isinstance(eagle1, EagleConfig)
    assert (eagle1.method, eagle3.method) == ("eagle", "eagle3")  # both files say LlamaForCausalLM
    assert eagle1.fc_bias  # no "bias" key means true
    assert (eagle1.rope_theta, eagle3.rope_theta) == (500000.0, 10000.0)  # a missing rope_theta means 10000
    assert (eagle1.own_embed, eagle3.own_embed) == (True, False)
    assert eagle3.aux_layers == (2, 4, 5)  # entered, of 8
    assert eagle1.rope_scaling is None
    assert eagle3.rope_scaling is None
