"""The matrix: who drafts, by which law, on which engine. A new drafter is a line in DRAFTERS.

Under the block law an engine has all of its shapes: a lone row decodes in a state of one, rows that rest take plain
steps. Token and coupled exchange what judges a row, so their engines have one shape, all slots and all levels.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.speculate.step import Params
from tests.engine.conftest import Rig
from tests.engine.laws import follow_lookup
from tests.lossless import models

SLOTS, MAX_LEN = 8, 64  # one window, prefill chunks of 16
LEVELS = 3  # how deep every drafter here drafts
NODES = 8  # of the largest tree, the pending token among them

LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
STATIC = {"tree_choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}
DYNAMIC = {"tree_topk": 3, "tree_depth": LEVELS, "tree_nodes": NODES}
CHAIN = {"tree_topk": 1}
# Name: the folder of the draft or of the heads, and the options.
DRAFTERS: Mapping[str, tuple[str | None, dict[str, Any]]] = {
    "none": (None, {"method": "none"}),
    "ngram": (None, {"method": "ngram", **LOOKUP, "prompt_lookup_min": 1}),
    "lookahead": (None, {"method": "lookahead", "lookahead_window": 2, "lookahead_candidates": 2}),
    "draft_model": ("draft", {"method": "draft_model"}),
    "medusa": ("medusa", {"method": "medusa", **STATIC}),
    "eagle-chain": ("eagle", {"method": "eagle", **CHAIN}),
    "eagle-tree": ("eagle", {"method": "eagle", **DYNAMIC}),
    "eagle3-chain": ("eagle3", {"method": "eagle3", **CHAIN}),
    "eagle3-tree": ("eagle3", {"method": "eagle3", **DYNAMIC}),
    "hybrid-draft_model": ("draft", {"method": "hybrid", **LOOKUP}),
    "hybrid-medusa": ("medusa", {"method": "hybrid", **LOOKUP, **STATIC}),
    "hybrid-eagle-chain": ("eagle", {"method": "hybrid", **LOOKUP, **CHAIN}),
    "hybrid-eagle3-tree": ("eagle3", {"method": "hybrid", **LOOKUP, **DYNAMIC}),
}
LAWS = ("token", "block", "coupled")


class Case(NamedTuple):
    """Who drafts, and who judges."""

    drafter: str
    law: str

    def __str__(self) -> str:
        return f"{self.drafter}-{self.law}"


# Without drafts token and block are the same program.
CASES = [Case(drafter, law) for drafter in DRAFTERS for law in LAWS if (drafter, law) != ("none", "token")]
PLAIN = {law: Case("none", "coupled" if law == "coupled" else "block") for law in LAWS}


def blurred(params: Mapping[str, jax.Array], scale: float) -> dict[str, jax.Array]:
    """The same parameters with a little noise, of a seed that belongs to the name: drafts that are right at times."""

    def noisy(name: str, x: jax.Array) -> jax.Array:
        if not np.issubdtype(x.dtype, np.floating) or x.ndim < 2:
            return x
        noise = np.random.default_rng(zlib.crc32(name.encode())).normal(0, scale, x.shape)
        return jax.device_put(np.asarray(x) + noise.astype(np.float32), x.sharding)

    return {name: noisy(name, x) for name, x in params.items()}


def scaled(params: Mapping[str, jax.Array], ending: str, by: float) -> dict[str, jax.Array]:
    """The same parameters, those whose name ends so times ``by``. By NumPy: nothing compiles."""
    return {
        name: jax.device_put(np.asarray(x) * np.float32(by), x.sharding) if name.endswith(ending) else x
        for name, x in params.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallRig(Rig):
    """``blurry``: parameters under which drafts are right at times; ``sure``: always, in greedy text."""

    case: Case
    blurry: Params
    sure: Params

    def favour(self, prefix: Sequence[int], p_V: np.ndarray) -> np.ndarray:
        """Ranks the ids by how much what drafts after ``prefix`` prefers them to the target, more or less."""
        folder, options = DRAFTERS[self.case.drafter]
        if "prompt_lookup_min" in options:
            found = follow_lookup(prefix, options["prompt_lookup_min"], options["prompt_lookup_max"])
            if found is not None or folder is None:
                return p_V + (np.arange(p_V.size) == found)
        if folder is None:
            return p_V
        # Medusa's first head stands one token behind.
        back, heads = (2, 1) if folder == "medusa" else (1, 0)
        q_V = models.reached(heads + 1)[:, prefix[-min(back, len(prefix))]]
        return np.log(q_V) - np.log(p_V + 1e-12)

    def use(self, params: Params) -> None:
        """From the next step on; the shapes are the same, so nothing compiles. Only while nothing runs."""
        self.engine.programs.params = params
