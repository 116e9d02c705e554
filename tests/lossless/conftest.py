"""One small engine for every way of drafting and every law, one after the other: a case has its engine to itself.

The matrix is CASES. A new drafter is a line in DRAFTERS: what it is loaded with, and how.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from checkpoints_convert.convert import convert
from checkpoints_convert.heads import convert_heads
from jaxspec import Engine, SpeculationConfig
from jaxspec.engine.load import load
from jaxspec.speculate.step import Params
from tests.engine.conftest import Rig, invariants_hold  # noqa: F401 - checks what the watch saw
from tests.engine.reference import Reference
from tests.engine.watch import Watch
from tests.lossless import models

SLOTS, MAX_LEN = 8, 64  # one window, prefill chunks of 16
LEVELS = 3  # how deep every drafter here drafts

LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
STATIC = {"tree_choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}
DYNAMIC = {"tree_topk": 3, "tree_depth": LEVELS, "tree_nodes": 8}
CHAIN = {"tree_topk": 1}
# Name: the folder of the draft or of the heads, and the options.
DRAFTERS: Mapping[str, tuple[str | None, dict[str, Any]]] = {
    "none": (None, {"method": "none"}),
    "ngram": (None, {"method": "ngram", **LOOKUP}),
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a case together, so that its engine is made once."""

    def order(item: pytest.Item) -> int:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # pyright: ignore
        return CASES.index(case) if isinstance(case, Case) else -1

    items.sort(key=order)


def blurred(params: Mapping[str, jax.Array], scale: float) -> dict[str, jax.Array]:
    """The same parameters with a little noise, of a seed that belongs to the name: drafts that are right at times."""

    def noisy(name: str, x: jax.Array) -> jax.Array:
        if not np.issubdtype(x.dtype, np.floating) or x.ndim < 2:
            return x
        noise = np.random.default_rng(zlib.crc32(name.encode())).normal(0, scale, x.shape)
        return jax.device_put(np.asarray(x) + noise.astype(np.float32), x.sharding)

    return {name: noisy(name, x) for name, x in params.items()}


@dataclasses.dataclass(frozen=True)
class SmallRig(Rig):
    """``blurry``: parameters under which drafts are right at times; ``sure``: always, in greedy text."""

    case: Case = Case("none", "block")
    blurry: Params = Params({}, {})
    sure: Params = Params({}, {})

    def use(self, params: Params) -> None:
        """From the next step on; the shapes are the same, so nothing compiles. Only while nothing runs."""
        self.engine.programs.params = params


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folders(name)``: a converted target ("target", "sure"), draft model or heads."""
    home = tmp_path_factory.mktemp("small")
    llamas = {
        "target": (2, models.llama(2, 0.3, 1.0, seed=1)),
        "sure": (2, models.llama(2, 0.0, 1.0, seed=1)),
        "draft": (1, models.llama(1, 0.0, 1.3, seed=2)),
    }
    heads = {"medusa": models.medusa(1.3), "eagle": models.eagle1(), "eagle3": models.eagle3(1.3)}

    def made(name: str) -> Path:
        if not (home / name).exists():
            source = home / "sources" / name
            if name in llamas:
                layers, tensors = llamas[name]
                models.write_llama(source, layers, tensors)
                convert(source / "hf", home / name)
            else:
                models.write_heads(source, name, heads[name])
                convert_heads(source, home / name, target=made("target"))
        return home / name

    return made


@pytest.fixture(scope="session")
def rigs(folders) -> Iterator[Callable[[Case], SmallRig]]:
    """``rigs(case)``: its warm engine. One at a time: a process cannot hold the executables of all of them."""
    held: dict[Case, SmallRig] = {}

    def open_rig(case: Case) -> SmallRig:
        folder, options = DRAFTERS[case.drafter]
        given = {} if folder is None else {"draft" if folder == "draft" else "heads": folders(folder)}
        speculation = SpeculationConfig(
            rejection_sample_method=case.law, num_speculative_tokens=LEVELS, **options
        )
        sizes = {"max_slots": SLOTS, "max_len": MAX_LEN}
        engine = Engine.load(
            folders("target"), speculation=speculation, mesh="1", max_queue=4096, **given, **sizes
        )
        programs = engine.programs
        # One size of round: the others are the same code, and tests/engine and tests/drafters run them.
        needed = tuple(sorted({0, programs.shapes.gamma(LEVELS)} if case.drafter != "none" else {0}))
        programs.shapes = programs.shapes._replace(gammas=needed)
        engine.warmup()
        sure = load(folders("sure"), speculation=speculation, mesh="1", dtype=None, draft=given.get("draft"),
                    heads=given.get("heads"), **sizes).programs.params  # fmt: skip
        blurry = Params(programs.params.target, blurred(programs.params.drafter, 0.1))
        rig = SmallRig(engine, Watch(engine), Reference(folders("target").parent / "sources" / "target"), None,
                       case, blurry, sure)  # fmt: skip
        rig.use(blurry)
        return rig

    def rig_of(case: Case) -> SmallRig:
        if case not in held:
            for old in list(held):
                held.pop(old).engine.close()
            held[case] = open_rig(case)
        return held[case]

    yield rig_of
    for rig in held.values():
        rig.engine.close()


@pytest.fixture
def rig(case: Case, rigs, compilations) -> Iterator[SmallRig]:
    """The engine of the test's case. Nothing compiles while a test uses it."""
    found = rigs(case)
    with compilations() as seen:
        yield found
    found.use(found.blurry)
    found.assert_idle()
    assert seen.names == []
