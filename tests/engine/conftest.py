"""Real engines over tiny models, shared by all tests here, and watched: every step is checked."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_convert.convert import convert
from checkpoints_convert.heads import convert_heads
from jaxspec import Chunk, Completion, Engine, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.engine.batch import Batch
from tests.engine.reference import Reference
from tests.engine.watch import Watch

SLOTS, MAX_LEN = 8, 240  # one window of 240, prefill chunks of 16 and 64
LOOKUP_MIN, LOOKUP_MAX = 1, 3  # one token is enough: random text repeats no more
WIDE_MAX_LEN = 300  # room for p150, 64 tokens and a tree of 64 nodes, and a third chunk, of 256
SMALL_SLOTS, SMALL_MAX_LEN, SMALL_QUEUE = 2, 61, 3


class Golden(NamedTuple):
    """A fixture prompt and the 64 tokens that a reference makes of it greedily, never at a near-tie."""

    ids: list[int]
    greedy: list[int]


class Job(NamedTuple):
    """What is asked of an engine; ``gamma`` None is the engine's own."""

    prompt: Sequence[int]
    sampling: SamplingParams
    gamma: int | None = None


def greedy(count: int | None, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, **{"ignore_eos": True, **options})  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Rig:
    """An engine, the watch on its steps, and float64 references of its models."""

    engine: Engine
    watch: Watch
    reference: Reference
    draft: Reference | None = None

    def start(self, job: Job, **options: object) -> Iterator[Chunk]:
        return self.engine.generate(job.prompt, job.sampling, SpeculationParams(job.gamma), **options)  # pyright: ignore

    def run(self, prompt: Sequence[int], sampling: SamplingParams, gamma: int | None = None) -> Completion:
        return Completion.of(self.start(Job(prompt, sampling, gamma)))

    def run_all(self, jobs: Sequence[Job]) -> list[Completion]:
        """All at once; the slots fill up and the rest queues."""
        return [Completion.of(chunks) for chunks in self.chunks(jobs)]

    def chunks(self, jobs: Sequence[Job]) -> list[list[Chunk]]:
        streams = [self.start(job) for job in jobs]
        return [list(stream) for stream in streams]

    def same_text(self, job: Job, got: Sequence[int], expected: Sequence[int]) -> int:
        """Near-ties at which two greedy texts part: 0 or 1; fails when they part anywhere else."""
        return self.reference.near_ties(job.prompt, got, expected)

    def assert_idle(self) -> None:
        loads = self.engine.loads()
        assert (loads.running, loads.waiting, loads.slots_free) == (0, 0, self.engine.server_info().max_slots)


def widest(engine: Engine, *, gammas: bool = False) -> None:
    """Every step has all slots, and all levels unless ``gammas`` are kept: one program where buckets need several.

    Before its first request and its watch. For tests that say something of a drafter at this vocabulary, not of
    buckets: tests/lossless runs every drafter alone, together and in rounds that rest, each in its own program.
    """
    shapes = engine.programs.shapes
    if not gammas and not engine.programs.decoder.drafter.is_lookup:  # lookups rest, in plain steps
        shapes = shapes._replace(gammas=shapes.gammas[-1:])
    engine.programs.shapes = shapes._replace(rows=shapes.rows[-1:])
    engine._loop.batch = Batch(engine.programs)


def share_programs(engine: Engine, others: Iterable[Engine]) -> None:
    """Runs the compiled programs of an engine that differs in its weights alone, if there is one."""
    own = engine.programs
    for other in (engine.programs for engine in others):
        if (own.decoder, own.shapes) == (other.decoder, other.shapes):
            own._compiled = other._compiled


@pytest.fixture(scope="session")
def goldens(shared: Path) -> dict[str, Golden]:
    data = np.load(shared / "fixtures" / "tiny-llama3" / "goldens.npz")
    return {
        name: Golden(data[f"{name}__input_ids"].tolist(), data[f"{name}__greedy_ids"].tolist())
        for name in ("p1", "p7", "p33", "p150")
    }


@pytest.fixture(scope="session")
def variant(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """``variant(name, change)``: tiny-llama3 with other weights, as a Hugging Face folder."""

    def make(name: str, change: Callable[[str, np.ndarray], np.ndarray]) -> Reference:
        folder = tmp_path_factory.mktemp(name) / "source"
        shutil.copytree(shared / "fixtures" / "tiny-llama3", folder, ignore=shutil.ignore_patterns("gguf", "meta*"))
        file = folder / "hf" / "model.safetensors"
        save_file({key: change(key, array).astype(np.float32) for key, array in load_file(file).items()}, file)
        return Reference(folder)

    return make


@pytest.fixture(scope="session")
def references(shared: Path, variant: Callable[..., Reference]) -> dict[str, Reference]:
    """tiny-llama3 and tiny-draft, and three variants of the former.

    ``near`` agrees with it on two tokens of three, a realistic draft; ``far`` on hardly any. ``loop`` hardly attends,
    so that its next token follows from the last: greedy text goes round in loops, which lookups predict.
    """
    rng = np.random.default_rng(17)
    other = np.random.default_rng(19)
    return {
        "tiny-llama3": Reference(shared / "fixtures" / "tiny-llama3"),
        "tiny-draft": Reference(shared / "fixtures" / "tiny-draft"),
        "tiny-llama3-8l": Reference(shared / "fixtures" / "tiny-llama3-8l"),
        "near": variant("near", lambda name, x: x + 0.005 * rng.standard_normal(x.shape) * (x.ndim == 2)),
        "far": variant("far", lambda name, x: x + 0.2 * other.standard_normal(x.shape) * (x.ndim == 2)),
        "loop": variant("loop", lambda name, x: x * (0.01 if "o_proj" in name else 1)),
    }


@pytest.fixture(scope="session")
def checkpoints(references: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoints(name)``: the converted folder of a reference."""
    home = tmp_path_factory.mktemp("engines")

    def converted(name: str) -> Path:
        if not (home / name).exists():
            convert(references[name].folder / "hf", home / name)
        return home / name

    return converted


@pytest.fixture(scope="session")
def make_rig(references, checkpoints) -> Iterator[Callable[..., Rig]]:
    """``make_rig(target, draft=..., method=..., warm=..., **engine options)``; engines close with the session.

    ``wide``: see ``widest``.
    """
    rigs: list[Rig] = []

    def make(
        target="tiny-llama3",
        *,
        draft=None,
        method="ngram",
        law="token",
        warm=True,
        wide=False,
        folder=None,
        draft_folder=None,
        **options,
    ) -> Rig:
        if draft is not None:
            method, draft_folder = "draft_model", draft_folder or checkpoints(draft)
        options = {"mesh": "1", "max_slots": SLOTS, "max_len": MAX_LEN, "max_queue": 4096, **options}
        speculation = SpeculationConfig(
            method=method,
            rejection_sample_method=law,
            prompt_lookup_min=LOOKUP_MIN,
            prompt_lookup_max=LOOKUP_MAX,
        )
        engine = Engine.load(folder or checkpoints(target), draft=draft_folder, speculation=speculation, **options)
        if wide:
            widest(engine)
        share_programs(engine, (rig.engine for rig in rigs))
        if warm:
            engine.warmup()
        rigs.append(Rig(engine, Watch(engine), references[target], references.get(draft)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.engine.close()


@pytest.fixture(scope="session")
def heads_folders(shared, checkpoints, tmp_path_factory) -> Callable[[str], Path]:
    """``heads_folders(fixture)``: the authors' heads of a fixture, converted with their target."""
    home = tmp_path_factory.mktemp("heads")

    def converted(fixture: str) -> Path:
        if not (home / fixture).exists():
            target = "tiny-llama3-8l" if fixture == "eagle3" else "tiny-llama3"
            convert_heads(shared / "fixtures" / fixture, home / fixture, target=checkpoints(target))
        return home / fixture

    return converted


@pytest.fixture(scope="module")
def heads_rig(references, checkpoints, heads_folders) -> Iterator[Callable[..., Rig]]:
    """``heads_rig(fixture, options, tree_topk=...)``: an engine with heads, gone when the module ends.

    Its steps are the widest; ``gammas`` keeps the buckets of depths.
    """
    rigs: dict[str, Rig] = {}

    def make(fixture: str, options: dict | None = None, *, gammas: bool = False, **speculation) -> Rig:
        key = f"{fixture} {options} {speculation}"
        if key not in rigs:
            target = "tiny-llama3-8l" if fixture == "eagle3" else "tiny-llama3"
            method = "eagle" if fixture == "eagle1" else fixture
            engine = Engine.load(
                checkpoints(target),
                heads=heads_folders(fixture),
                speculation=SpeculationConfig(**{"method": method, **speculation}),
                **{"mesh": "1", "max_slots": 3, "max_len": MAX_LEN, "max_queue": 4096, **(options or {})},
            )
            widest(engine, gammas=gammas)
            rigs[key] = Rig(engine, Watch(engine), references[target])
        return rigs[key]

    yield make
    for rig in rigs.values():
        rig.engine.close()


@pytest.fixture(scope="session")
def ngram(make_rig) -> Rig:
    return make_rig()


@pytest.fixture(scope="session")
def loop(ngram, make_rig) -> Rig:
    """Prompt lookup on a model whose text repeats itself."""
    return make_rig("loop", warm=False)


@pytest.fixture(scope="session")
def self_draft(make_rig) -> Rig:
    """The target drafts for itself: everything is accepted."""
    return make_rig(draft="tiny-llama3")


@pytest.fixture(scope="session")
def near_draft(self_draft, make_rig) -> Rig:
    """A draft that is right about two times in three."""
    return make_rig(draft="near")


@pytest.fixture(scope="session")
def far_draft(self_draft, make_rig) -> Rig:
    """A draft that is nearly always wrong."""
    return make_rig(draft="far")


@pytest.fixture(scope="session")
def plain(make_rig) -> Rig:
    """No drafter; few slots, short context, short queue."""
    return make_rig(method="none", max_slots=SMALL_SLOTS, max_len=SMALL_MAX_LEN, max_queue=SMALL_QUEUE)


DRAFT_CONTEXT = 200


@pytest.fixture(scope="session")
def edited(checkpoints, tmp_path_factory) -> Callable[..., Path]:
    """``edited(name, file="config.json", **values)``: a copy of a checkpoint with other values in a JSON file."""

    def edit(name: str, file: str = "config.json", **values: object) -> Path:
        folder = tmp_path_factory.mktemp("edited") / name
        shutil.copytree(checkpoints(name), folder)
        data = json.loads((folder / file).read_text())
        assert set(values) <= set(data)
        (folder / file).write_text(json.dumps(data | values))
        return folder

    return edit


@pytest.fixture(scope="session")
def tiny_draft(make_rig, edited) -> Rig:
    """A draft that is nearly always wrong and was trained for 200 positions; windows of 128 and 512 slots."""
    folder = edited("tiny-draft", max_position_embeddings=DRAFT_CONTEXT)
    return make_rig(draft="tiny-draft", draft_folder=folder, warm=False, wide=True, max_slots=3, max_len=512)


@pytest.fixture(scope="session")
def mesh4(make_rig) -> Rig:
    """Sharded over four devices: heads, ffn and vocabulary."""
    return make_rig(draft="near", warm=False, wide=True, mesh="4", max_slots=2)


@pytest.fixture(autouse=True)
def invariants_hold() -> Iterator[None]:
    """Fails a test during which a step of any engine broke an invariant."""
    Watch.violations.clear()
    yield
    assert not Watch.violations, "\n".join(Watch.violations[:5])
