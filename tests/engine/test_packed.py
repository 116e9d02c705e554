"""Shipped folders in the engine: the text and the drafts of the folder they were packed from."""

import pytest

from checkpoints_convert.pack import pack
from jaxspec import Completion, Engine, SamplingParams, SpeculationConfig
from jaxspec.errors import UserError


def completion(target, **given):
    with Engine.load(target, mesh="1", max_slots=1, max_len=64, **given) as engine:
        return Completion.of(engine.generate([5, 6, 7], SamplingParams(max_tokens=12, temperature=0.0)))


def test_a_draft_takes_its_ends_from_the_target(tiny_models, tmp_path):
    """The LM head trimmed, too: its rows are the target's."""
    target = tiny_models("tiny-llama3-8l")
    dst = tmp_path / "packed"
    assert pack(target, dst, beside=target).shared == ("embed", "lm_head")
    speculation = SpeculationConfig(method="draft_model", num_speculative_tokens=2, draft_vocab_size=100)
    whole, packed = (completion(target, draft=draft, speculation=speculation) for draft in (target, dst))
    assert packed.token_ids == whole.token_ids
    assert packed.summary.speculation == whole.summary.speculation
    assert packed.summary.speculation.num_accepted_draft_tokens > 0


def test_a_draft_of_another_target_is_refused(tiny_models, tmp_path):
    target = tiny_models("tiny-llama3-8l")
    pack(target, tmp_path / "packed", beside=target)
    with pytest.raises(UserError, match=r"takes embed from its target: expected shape \[.*got|tokenizer differs"):
        completion(tiny_models("tiny-llama3-256-q4_k_m"), draft=tmp_path / "packed")
