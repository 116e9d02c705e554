"""One small engine for every way of drafting and every law, one after the other: a case has its engine to itself."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoints_convert.convert import convert
from checkpoints_convert.heads import convert_heads
from jaxspec import Engine, SpeculationConfig
from jaxspec.engine.load import load
from jaxspec.speculate.step import Params
from tests.engine.conftest import invariants_hold, widest  # noqa: F401 - the fixture checks what the watch saw
from tests.engine.reference import Reference
from tests.engine.watch import Watch
from tests.lossless import models
from tests.lossless.cases import CASES, DRAFTERS, LEVELS, MAX_LEN, PLAIN, SLOTS, Case, SmallRig, blurred, scaled
from tests.lossless.texts import Texts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a case together, so that its engine is made once."""

    def order(item: pytest.Item) -> int:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # pyright: ignore
        return CASES.index(case) if isinstance(case, Case) else -1

    items.sort(key=order)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folders(name)``: a converted target ("target", "sure"), draft model or heads."""
    home = tmp_path_factory.mktemp("small")
    llamas = {
        "target": (2, models.llama(2, 0.06, 1.0, seed=1)),
        "sure": (2, models.llama(2, 0.0, 3.0, seed=1)),
        "draft": (1, models.llama(1, 0.0, models.DRAFT_SHARPNESS, seed=2)),
    }
    heads = {"medusa": models.medusa(), "eagle": models.eagle1(), "eagle3": models.eagle3()}

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
        speculation = SpeculationConfig(rejection_sample_method=case.law, num_speculative_tokens=LEVELS, **options)
        given = {"speculation": speculation, "mesh": "1", "dtype": None, "max_slots": SLOTS, "max_len": MAX_LEN}
        given |= {"draft": folders(folder) if folder == "draft" else None}
        given |= {"heads": folders(folder) if folder not in ("draft", None) else None}
        engine = Engine.load(folders("target"), max_queue=4096, **given)
        programs = engine.programs
        # One size of round: the others are the same code, and tests/engine and tests/drafters run them.
        needed = tuple(sorted({0, programs.shapes.gamma(LEVELS)} if case.drafter != "none" else {0}))
        programs.shapes = programs.shapes._replace(gammas=needed)
        if case.law != "block" and case.drafter != "none":
            widest(engine)  # a law judges row by row; rows alone and plain steps are the block engine's
        engine.warmup()
        sure = load(folders("sure"), **given).programs.params
        blurry = Params(programs.params.target, blurred(programs.params.drafter, 0.04))
        # Confident, too: of a tree that follows confidence the right path is the deepest.
        sure = sure._replace(drafter=scaled(sure.drafter, "lm_head", 3.0))
        reference = Reference(folders("target").parent / "sources" / "target")
        rig = SmallRig(engine, Watch(engine), reference, case=case, blurry=blurry, sure=sure)
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


@pytest.fixture(scope="session")
def plain_texts(rigs) -> Callable[[str], Texts]:
    """``plain_texts(law)``, made once."""
    made: dict[Case, Texts] = {}

    def texts(law: str) -> Texts:
        case = PLAIN[law]
        if case not in made:
            made[case] = Texts.of(rigs(case))
        return made[case]

    return texts


@pytest.fixture
def plain(case: Case, plain_texts) -> Texts:
    """The texts of the case's law without speculation."""
    return plain_texts(case.law)


@pytest.fixture
def rig(case: Case, plain: Texts, rigs, compilations) -> Iterator[SmallRig]:
    """The engine of the test's case. Nothing compiles while a test uses it."""
    found = rigs(case)
    with compilations() as seen:
        yield found
    found.use(found.blurry)
    found.assert_idle()
    assert seen.names == []
