"""The compiled programs of decoding: one executable per shape, all made before the first request.

The shapes are few. A state has B rows, 1 or all slots, and S slots per row, one of two windows: the cache's own
length is the window that attention reads, and it grows by one copy. docs/decisions/gamma-buckets.md has the reasons.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.shapes import GAMMA_BUCKETS, GAMMA_MAX
from jaxspec.speculate.state import DecodeState, StepReport
from jaxspec.speculate.step import Decoder, Params, extract, insert, state_axes

CHUNKS: Final = (16, 64, 256)  # prompt tokens of one prefill pass
BUSY_CHUNK: Final = 64  # the most of them while other rows decode


class Shapes(NamedTuple):
    """The buckets of a server. Every bucket that the host picks comes from here."""

    rows: tuple[int, ...]
    windows: tuple[int, ...]
    chunks: tuple[int, ...]
    gammas: tuple[int, ...]

    @classmethod
    def of(
        cls,
        max_slots: int,
        max_len: int,
        max_gamma: int,
        *,
        gammas: Sequence[int] = GAMMA_BUCKETS,
        deterministic: bool = False,
    ) -> "Shapes":
        """Rows 1 and max_slots; windows of a quarter and all of max_len; chunks and gammas that can occur.

        Few, because each costs seconds of start-up: a third window would save less than a tenth of a step.
        ``deterministic``: every step has the one largest shape, and how a prompt is cut follows from its length alone
        (docs/decisions/deterministic.md).
        """
        if deterministic:
            chunks = tuple(c for c in CHUNKS if c < max_len and c <= BUSY_CHUNK)
            return cls((max_slots,), (max_len,), chunks or CHUNKS[:1], (max(g for g in gammas if g <= max_gamma),))
        windows = {max_len} | {w for w in (max_len // 4,) if w >= 128}
        chunks = [c for c in CHUNKS if c < max_len]
        needed = [g for g, below in zip(gammas, (-1, *gammas), strict=False) if below < max_gamma]
        return cls(tuple(sorted({1, max_slots})), tuple(sorted(windows)), tuple(chunks or CHUNKS[:1]), tuple(needed))

    def window(self, slots: int) -> int:
        """The smallest window of at least ``slots``."""
        return next(w for w in self.windows if w >= slots)

    def gamma(self, gamma: int) -> int:
        """The smallest gamma bucket of at least ``gamma``."""
        return next(g for g in self.gammas if g >= gamma)

    def chunk(self, tokens: int, largest: int) -> int:
        """The smallest chunk that holds ``tokens``, or the largest allowed one."""
        allowed = [c for c in self.chunks if c <= largest] or list(self.chunks[:1])
        return next((c for c in allowed if c >= tokens), allowed[-1])


class Program(NamedTuple):
    """Which executable: ``size`` is a gamma, a chunk or a window, as the name needs."""

    name: str
    rows: int
    window: int
    size: int = 0


class Programs:
    """Calls by name and shape. A program that is not compiled yet is compiled on its first call."""

    def __init__(self, decoder: Decoder, params: Params, shapes: Shapes) -> None:
        self.decoder = decoder
        self.params = params
        self.shapes = shapes
        self._compiled: dict[Program, Any] = {}
        self._lock = threading.Lock()
        # Slots past the committed tokens that a step may need; a row's next token besides.
        drafter = decoder.drafter
        self.nodes = max(GAMMA_MAX, *(drafter.drafts(gamma) + drafter.window(gamma) for gamma in shapes.gammas)) + 1
        self._rehearsal = threading.Lock()  # one state at a time: a cache may fill half the memory

    def planned(self, windows: int | None = None) -> list[Program]:
        """Everything that serving can ask for (in the smallest ``windows`` windows), the slowest to compile first."""
        shapes = self.shapes._replace(windows=self.shapes.windows[:windows])
        largest = shapes.rows[-1]
        programs = [Program("step", *key) for key in itertools.product(shapes.rows, shapes.windows, shapes.gammas)]
        programs += [Program("prefill", 1, *key) for key in itertools.product(shapes.windows, shapes.chunks)]
        if self.decoder.drafter.has_cache:
            keys = itertools.product(shapes.windows, shapes.chunks)
            programs += [Program("prefill_drafter", 1, *key) for key in keys]
        for window in shapes.windows:
            programs += [Program("start", 1, window)]
            if largest > 1:
                programs += [Program(name, largest, window) for name in ("empty", "insert", "extract")]
        for rows, (small, large) in itertools.product(shapes.rows, itertools.pairwise(shapes.windows)):
            programs.append(Program("grow", rows, small, large))
        return programs

    def compile_all(
        self, on_progress: Callable[[int, int], None] | None = None, windows: int | None = None, threads: int = 4
    ) -> None:
        """Compiles every planned program and runs each step once. Nothing is left for the first request to wait for."""
        planned = self.planned(windows)
        with ThreadPoolExecutor(threads) as pool:
            for done, _ in enumerate(pool.map(self._prepare, planned), 1):
                if on_progress:
                    on_progress(done, len(planned))

    def _prepare(self, program: Program) -> None:
        """Compiles a program, and runs a step once on rows at rest: its first call takes several times as long."""
        self._get(program)
        if program.name == "step":
            with self._rehearsal:
                state = jax.tree.map(
                    lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
                    self.abstract_state(program.rows, program.window),
                )
                _, report = self.step(state, np.full((program.rows,), -1, np.int32), program.size)
                report.packed.block_until_ready()

    def start(self, tokens_BS: np.ndarray, length_B: np.ndarray, rows: Any) -> DecodeState:
        """See ``Decoder.start``; one row."""
        return self._get(Program("start", *tokens_BS.shape))(tokens_BS, length_B, rows)

    def empty(self, window: int) -> DecodeState:
        """A state of all slots, empty."""
        return self._get(Program("empty", self.shapes.rows[-1], window))()

    def prefill(self, state: DecodeState, start: int, chunk: int) -> tuple[DecodeState, StepReport]:
        """See ``Decoder.prefill``; donates the state."""
        return self._get(Program("prefill", *state.shape, chunk))(self.params, state, np.int32(start))

    def prefill_drafter(self, state: DecodeState, start: int, chunk: int) -> DecodeState:
        """See ``Decoder.prefill_drafter``; donates the state."""
        return self._get(Program("prefill_drafter", *state.shape, chunk))(self.params, state, np.int32(start))

    def step(self, state: DecodeState, gamma_B: np.ndarray, gamma: int) -> tuple[DecodeState, StepReport]:
        """See ``Decoder.step``; donates the state."""
        return self._get(Program("step", *state.shape, gamma))(self.params, state, gamma_B)

    def grow(self, state: DecodeState, window: int) -> DecodeState:
        """Copies the state into a larger window, bucket by bucket."""
        for larger in self.shapes.windows:
            if state.shape[1] < larger <= window:
                state = self._get(Program("grow", *state.shape, larger))(state)
        return state

    def insert(self, state: DecodeState, row: DecodeState, slot: int) -> DecodeState:
        """Puts a one-row state into a slot; donates ``state``."""
        return self._get(Program("insert", *state.shape))(state, row, np.int32(slot))

    def extract(self, state: DecodeState, slot: int) -> DecodeState:
        """Copies a slot out as a one-row state."""
        return self._get(Program("extract", *state.shape))(state, np.int32(slot))

    def _get(self, program: Program) -> Any:
        found = self._compiled.get(program)
        if found is None:
            found = self.lower(program).compile()
            with self._lock:
                self._compiled[program] = found
        return found

    def abstract_state(self, rows: int, window: int) -> DecodeState:
        """Shapes and shardings of a state, without memory."""
        state = jax.eval_shape(lambda: self.decoder.empty(rows, window))
        sharding = self.decoder.target.sharding
        return jax.tree.map(
            lambda x, axes: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.named(axes, x.shape)),
            state,
            state_axes(self.decoder, state),
        )

    def lower(self, program: Program) -> Any:
        """The lowered program, from abstract arrays alone (``params`` may be abstract, too)."""
        decoder = self.decoder
        _, rows, window, size = program
        replicated = decoder.target.sharding.replicated

        def host(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

        state = self.abstract_state(rows, window)
        layout = jax.tree.map(lambda x: x.sharding, state)
        scalar = host((), jnp.int32)
        match program.name:
            case "step":

                def step(params: Params, state: DecodeState, gamma_B: jax.Array) -> tuple[DecodeState, StepReport]:
                    return decoder.step(params, state, gamma_B, size)

                arguments = (self.params, state, host((rows,), jnp.int32))
                return jax.jit(step, donate_argnums=1, out_shardings=(layout, replicated)).lower(*arguments)
            case "prefill":

                def prefill(params: Params, state: DecodeState, start: jax.Array) -> tuple[DecodeState, StepReport]:
                    return decoder.prefill(params, state, start, size)

                jitted = jax.jit(prefill, donate_argnums=1, out_shardings=(layout, replicated))
                return jitted.lower(self.params, state, scalar)
            case "prefill_drafter":

                def prefill_drafter(params: Params, state: DecodeState, start: jax.Array) -> DecodeState:
                    return decoder.prefill_drafter(params, state, start, size)

                jitted = jax.jit(prefill_drafter, donate_argnums=1, out_shardings=layout)
                return jitted.lower(self.params, state, scalar)
            case "start":
                arguments = (state.tokens_BS, state.length_B, state.rows)
                arguments = jax.tree.map(lambda x: host(x.shape, x.dtype), arguments)
                return jax.jit(decoder.start, out_shardings=layout).lower(*arguments)
            case "empty":
                return jax.jit(lambda: decoder.empty(rows, window), out_shardings=layout).lower()
            case "insert":
                row = self.abstract_state(1, window)
                return jax.jit(insert, donate_argnums=0, out_shardings=layout).lower(state, row, scalar)
            case "extract":
                row = self.abstract_state(1, window)
                row_layout = jax.tree.map(lambda x: x.sharding, row)
                return jax.jit(extract, out_shardings=row_layout).lower(state, scalar)
            case "grow":
                grown = jax.tree.map(lambda x: x.sharding, self.abstract_state(rows, size))
                return jax.jit(lambda state: decoder.grow(state, size), out_shardings=grown).lower(state)
            case _:
                raise ValueError(f"unknown program {program.name!r}")
