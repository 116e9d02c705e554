"""The authors' traces of Medusa and EAGLE, and what an engine drafts, step by step."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxspec.speculate.noise import Draws
from jaxspec.speculate.state import Context
from tests.engine.conftest import Job, Rig, greedy


class Step(NamedTuple):
    """One round. ``tokens``: the pending one and all drafts; ``parents``: node of each draft's parent."""

    tokens: list[int]
    parents: list[int] | None
    accepted: int


class Trace(NamedTuple):
    """What the authors' code did with a prompt, greedily."""

    prompt: list[int]
    generated: list[int]
    steps: list[Step]


def traces(folder: Path) -> dict[str, Trace]:
    """By the prompt's name."""
    found = json.loads((folder / "trace.json").read_text())["traces"]

    def step(data: dict) -> Step:
        if "tree_candidates" in data:  # Medusa: one tree for all
            return Step(data["tree_candidates"], None, data["accept_length"])
        return Step(data["draft_tokens"], data["tree_parent"][1:], data["accept_length"])

    return {
        name: Trace(trace["prompt_ids"], trace["generated"], [step(data) for data in trace["steps"]])
        for name, trace in found.items()
    }


@functools.lru_cache(maxsize=1)
def proposer(rig: Rig) -> Callable:
    """``proposer(rig)(params, state)``: what the next round drafts, and the parents of those nodes."""
    decoder, depth = rig.engine.programs.decoder, rig.engine.programs.shapes.gammas[-1]

    @jax.jit
    def propose(params, state):
        context = Context(state.tokens_BS, state.length_B, state.rows)
        draws = Draws(state.rows.seed_B2, state.length_B, coupled=False)
        model = decoder.target.merge(params.target)
        proposal, _ = decoder.drafter.propose(params.drafter, model, state.drafter, context, depth, draws)
        return proposal.tokens_BJ, proposal.topology.parent_BJ  # pyright: ignore

    return propose


def follow(rig: Rig, trace: Trace) -> list[Step]:
    """The rounds of the engine on the trace's prompt, as many as the authors' code took."""
    programs, depth, propose = rig.engine.programs, rig.engine.programs.shapes.gammas[-1], proposer(rig)
    proposals = []

    def note(batch, running) -> None:
        (request,) = running.values()
        tokens_BJ, parent_BJ = propose(programs.params, batch._state)
        proposals.append(
            ([request.token_ids[-1], *np.asarray(tokens_BJ)[0].tolist()], np.asarray(parent_BJ)[0].tolist())
        )

    # Room to draft all levels in every step that is compared.
    job = Job(trace.prompt, greedy(len(trace.generated) + depth + 1))
    with rig.watch.recording() as steps, rig.watch.meddling(note):
        done = rig.run(*job)
    assert list(done.token_ids[: len(trace.generated)]) == trace.generated
    rounds = [Step(*proposal, rows[0].accepted) for proposal, rows in zip(proposals, steps, strict=True)]
    return rounds[: len(trace.steps)]
