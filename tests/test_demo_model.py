"""The real model: greedy continuations of SmolLM2-135M-Instruct equal the reference's, token for token.

Where the reference's two best logits lie within NEAR_TIE, either token is right: such a place is counted, and what
follows it in that prompt is not compared.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from jaxspec import Engine, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.engine.load import Loaded, load
from jaxspec.engine.records import Completion
from jaxspec.score import Scorer

NEAR_TIE = 1e-3
NEAR_TIES_IN_ALL = 1  # places in the reference with a smaller gap
MAX_LEN = 1024


@dataclasses.dataclass(frozen=True)
class Reference:
    """A prompt and its greedy continuation; ``gaps``: best logit minus second best, per token."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    gaps: tuple[float, ...]

    def near_ties_met(self, token_ids: Sequence[int]) -> int:
        """How many near-ties (0 or 1) explain a difference. Fails when none does."""
        assert len(token_ids) <= len(self.continuation)
        for step, (ours, theirs) in enumerate(zip(token_ids, self.continuation, strict=False)):
            if ours != theirs:
                assert self.gaps[step] < NEAR_TIE, f"token {step}: expected {theirs}, got {ours}"
                return 1
        return 0


@pytest.fixture(scope="module")
def references(shared: Path) -> list[Reference]:
    data = json.loads((shared / "fixtures" / "smollm2" / "smollm2_greedy.json").read_text())
    return [
        Reference(tuple(entry["prompt_ids"]), tuple(entry["continuation_128"]), tuple(entry["top2_gap"]))
        for entry in data["prompts"]
    ]


def loaded_on(mesh: str, demo_model: Path) -> Loaded:
    return load(
        demo_model,
        draft=None,
        speculation=SpeculationConfig(method="ngram"),
        mesh=mesh,
        dtype="float32",
        max_slots=4,
        max_len=MAX_LEN,
    )


def argmaxes(loaded: Loaded, references: Sequence[Reference]) -> Iterator[list[int]]:
    """The greedy token at every place of the given continuations, by one scoring pass each."""
    programs = loaded.programs
    scorer = Scorer(programs.decoder.target, programs.params.target, longest=MAX_LEN, chunk=256, with_logits=True)
    for reference in references:
        best: list[int] = []
        for part in scorer.parts(reference.prompt + reference.continuation[:-1]):
            assert part.logits_TV is not None
            best += part.logits_TV.argmax(axis=1).tolist()
        yield best[len(reference.prompt) - 1 :]


@pytest.fixture(scope="module")
def alone(demo_model: Path) -> Loaded:
    return loaded_on("1", demo_model)


@pytest.fixture(scope="module")
def engine(alone: Loaded) -> Iterator[Engine]:
    # Not warmed up: a request alone compiles the few programs of one row that it needs.
    with Engine(alone, max_slots=4, max_len=MAX_LEN, max_queue=7) as engine:
        yield engine


def test_every_greedy_choice_is_the_references(alone: Loaded, references: list[Reference]) -> None:
    assert len(references) == 12
    met = 0
    for reference, best in zip(references, argmaxes(alone, references), strict=True):
        assert len(best) == 128
        met += reference.near_ties_met(best)
    assert met <= NEAR_TIES_IN_ALL == sum(gap < NEAR_TIE for each in references for gap in each.gaps)


def generated(engine: Engine, reference: Reference, gamma: int) -> list[int]:
    sampling = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    done = Completion.of(engine.generate(reference.prompt, sampling, SpeculationParams(gamma)))
    assert (done.summary.speculation.num_accepted_draft_tokens > 0) == (gamma > 0)
    return list(done.token_ids)


# Short prompts of three groups, without near-ties: their requests share one window and one prefill shape.
@pytest.mark.parametrize("number", [0, 2, 6])
@pytest.mark.parametrize("gamma", [0, 8])
def test_generated_ids_are_the_references(engine: Engine, references: list[Reference], number: int, gamma: int) -> None:
    assert generated(engine, references[number], gamma) == list(references[number].continuation)


def test_generated_ids_are_the_references_on_a_mesh_of_four(demo_model: Path, references: list[Reference]) -> None:
    with Engine(loaded_on("4", demo_model), max_slots=4, max_len=MAX_LEN, max_queue=7) as engine:
        assert engine.server_info().mesh == {"data": 1, "model": 4}
        for number, gamma in ((6, 0), (2, 8)):
            assert generated(engine, references[number], gamma) == list(references[number].continuation)
