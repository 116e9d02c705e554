"""One real server over a tiny model that the serving tests share, and the means to start others."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec import Engine
from jaxspec.engine.params import SamplingParams, SpeculationConfig
from jaxspec.engine.records import Loads
from serve.client import Client
from serve.server import Server, ServerOptions

# A context below 256 has one cache window, which keeps the number of programs to compile small.
SLOTS, MAX_LEN, MAX_QUEUE = 3, 251, 11


@dataclasses.dataclass(frozen=True)
class Golden:
    """A prompt, and what a reference implementation makes of it greedily; its two best logits never nearly tie."""

    ids: tuple[int, ...]
    greedy: tuple[int, ...]

    def sampling(self, count: int = 64) -> SamplingParams:
        return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="session")
def goldens(shared: Path) -> dict[str, Golden]:
    data = np.load(shared / "fixtures" / "tiny-llama3" / "goldens.npz")
    return {
        name: Golden(tuple(data[f"{name}__input_ids"].tolist()), tuple(data[f"{name}__greedy_ids"].tolist()))
        for name in ("p1", "p7", "p33", "p150")
    }


class Running:
    """A server on a thread of its own, as the tests see it. Without an engine it stays as it is while loading."""

    def __init__(self, engine: Engine | None, options: ServerOptions) -> None:
        self._engine = engine
        self.server = Server(options)
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self.server.start())
        if self._engine is not None:
            self._loop.run_until_complete(self.server.attach(self._engine))
        started.set()
        self._loop.run_forever()
        self._loop.close()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def addr(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def loads(self) -> Loads:
        return self.engine.loads()

    def wait(self, what: str, holds: Callable[[Loads], bool], limit_s: float = 30.0) -> None:
        """Returns once the loads are so; fails when they are not within a generous limit."""
        deadline = time.monotonic() + limit_s
        while not holds(self.loads()):
            if time.monotonic() > deadline:
                pytest.fail(f"{what}: not within {limit_s} s, but {self.loads()}")
            time.sleep(0.002)

    def wait_idle(self) -> None:
        """Every slot is free, and nothing remembers a request (H08)."""
        live = self.server.service._live
        self.wait("idle", lambda loads: loads.running == loads.waiting == 0 and loads.slots_free == SLOTS and not live)

    def call(self, coroutine_function: Callable[[], object]) -> None:
        """Runs a coroutine function of the server on its loop."""
        asyncio.run_coroutine_threadsafe(coroutine_function(), self._loop).result(timeout=60)  # pyright: ignore

    def stop(self) -> None:
        self.call(self.server.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextlib.contextmanager
def serving(target: Path, draft: Path | None, options: ServerOptions) -> Iterator[Running]:
    engine = Engine.load(
        target,
        draft=draft,
        speculation=SpeculationConfig(method="none" if draft is None else "draft_model"),
        mesh="1",
        max_slots=SLOTS,
        max_len=MAX_LEN,
        max_queue=MAX_QUEUE,
    )
    engine.warmup()
    running = Running(engine, options)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def shared_server(tiny_models: Callable[[str], Path]) -> Iterator[Running]:
    """The model drafts for itself, so that greedy drafts are accepted and steps commit many tokens."""
    model, options = tiny_models("tiny-llama3"), ServerOptions(port=0, metrics_port=0, drain_s=0.0)
    with serving(model, model, options) as running:
        yield running


@pytest.fixture
def doomed_server(tiny_models: Callable[[str], Path]) -> Iterator[Running]:
    """A server for one test to end; plain decoding has few programs to compile."""
    with serving(tiny_models("tiny-llama3"), None, ServerOptions(port=0, drain_s=0.0)) as running:
        yield running


@pytest.fixture
def loading_server() -> Iterator[Running]:
    """A server whose model never comes; clients may ping it ten times a second."""
    running = Running(None, ServerOptions(port=0, min_ping_s=0.1))
    yield running
    running.stop()


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The shared server; whatever a test does, every slot must come back."""
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(server.addr) as client:
        yield client


@pytest.fixture
def slow_down(monkeypatch: pytest.MonkeyPatch) -> Callable[[Running], None]:
    """Makes decode steps take at least 20 ms, as a large model's do: what runs still runs when a test looks."""

    def slow(running: Running) -> None:
        programs = running.engine.programs
        step = programs.step

        def slow_step(*arguments: Any) -> Any:
            time.sleep(0.02)
            return step(*arguments)

        monkeypatch.setattr(programs, "step", slow_step)

    return slow


@pytest.fixture
def slow_steps(server: Running, slow_down: Callable[[Running], None]) -> None:
    slow_down(server)
