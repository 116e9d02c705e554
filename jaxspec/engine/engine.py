"""The engine: one thread owns the devices; requests come in from any thread or event loop and stream back out."""

import asyncio
import contextlib
import os
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

import jax

from jaxspec.checkpoint import open_heads
from jaxspec.engine.load import Loaded, load
from jaxspec.engine.loop import Loop
from jaxspec.engine.params import Prompt, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.engine.prompts import encode_prompt
from jaxspec.engine.records import Chunk, Loads, ModelInfo, ServerInfo
from jaxspec.engine.request import Request
from jaxspec.errors import InvalidRequest
from jaxspec.speculate.programs import Programs
from jaxspec.text import Tokenizer


class Engine:
    """Decodes requests with continuous batching. Made by :meth:`load`; a context manager, or to be closed."""

    def __init__(self, loaded: Loaded, *, max_slots: int, max_len: int, max_queue: int) -> None:
        self._loaded = loaded
        self._max_slots, self._max_len, self._max_queue = max_slots, max_len, max_queue
        self._loop = Loop(loaded, max_slots=max_slots, max_len=max_len, max_queue=max_queue)
        self._warm = False

    @classmethod
    def load(
        cls,
        target: str | Path,
        *,
        draft: str | Path | None = None,
        heads: str | Path | None = None,
        speculation: SpeculationConfig | None = None,
        mesh: str | Mapping[str, int] = "auto",
        dtype: str | None = None,
        max_slots: int = 4,
        max_len: int = 1024,
        max_queue: int = 64,
        deterministic: bool = False,
        compilation_cache: str | Path | None = None,
    ) -> Self:
        """Loads converted checkpoints onto the mesh. Nothing is compiled yet: see :meth:`warmup`.

        Args:
            target: converted checkpoint folder.
            draft: converted checkpoint of a smaller model; method draft_model unless ``speculation`` says otherwise.
            heads: converted Medusa or EAGLE heads; their own method unless ``speculation`` says otherwise.
            mesh: "auto" (every device on the model axis), "4", "data=1,model=4" or a mapping.
            dtype: "float32" or "bfloat16"; float32 on CPU and bfloat16 elsewhere by default.
            max_slots: requests that decode at once.
            max_len: tokens of prompt and completion together.
            max_queue: requests that may wait for a slot.
            deterministic: every step in one padded shape: greedy ids, and those of a seed, are the same to the last
                bit alone and in company, and with speculation as without where the law allows it at all. Slower.
            compilation_cache: folder that keeps compiled programs between runs.

        Raises UserError for whatever does not fit together.
        """
        if speculation is None:
            method = "ngram" if draft is None else "draft_model"
            speculation = SpeculationConfig(method=method if heads is None else open_heads(heads).config.method)
        if max_queue < 0:
            raise InvalidRequest("max_queue", max_queue, "an integer >= 0")
        if compilation_cache is not None:
            jax.config.update("jax_compilation_cache_dir", str(compilation_cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        loaded = load(
            target,
            draft=draft,
            heads=heads,
            speculation=speculation,
            mesh=mesh,
            dtype=dtype,
            max_slots=max_slots,
            max_len=max_len,
            deterministic=deterministic,
        )
        return cls(loaded, max_slots=max_slots, max_len=max_len, max_queue=max_queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- start and end -------------------------------------------------------------------------------------------

    def warmup(self, on_progress: Callable[[str, int, int], None] | None = None, *, windows: int | None = None) -> None:
        """Compiles everything that serving can ask for, then runs one request through it. Nothing compiles after.

        ``windows``: only for rows of the smallest so many windows; a row that outgrows them compiles when it does.
        """

        def compiled(done: int, total: int) -> None:
            if on_progress:
                on_progress("compile", done, total)

        self.programs.compile_all(compiled, windows)
        bos = self._loaded.checkpoint.config.bos_token_id or 0
        for _ in self.generate([bos], SamplingParams(max_tokens=2, temperature=0.0)):
            pass
        self._loop.tally.reset()
        self._warm = True

    @property
    def programs(self) -> Programs:
        """The compiled programs and the parameters they run on (for measurements)."""
        return self._loaded.programs

    @property
    def ready(self) -> bool:
        """Warm, taking requests, and alive."""
        return self._warm and self._loop.open

    def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets the others finish for up to ``timeout_s`` seconds, then aborts the rest."""
        self._loop.drain(timeout_s)

    def close(self) -> None:
        """Aborts what runs and stops the engine's thread."""
        self._loop.close()

    # ---- requests ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt | str | Sequence[int],
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> "ChunkStream":
        """Chunks of one completion as they come; the last has finish reason and summary. Closing it aborts.

        The request is checked and queued at once. Raises InvalidRequest, QueueFull, Unavailable; while iterating
        TimeoutError after ``timeout_s`` and EngineFault.
        """
        chunks: queue.SimpleQueue[Chunk | BaseException] = queue.SimpleQueue()
        request = self._submit(prompt, sampling, speculation, request_id, timeout_s, chunks.put)
        return ChunkStream(chunks, lambda: self._loop.cancel(request))

    async def stream(
        self,
        prompt: Prompt | str | Sequence[int],
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """:meth:`generate` for asyncio. Tokenizing runs in a thread; cancelling or ``aclose`` aborts the request."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()

        def sink(item: Chunk | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(chunks.put_nowait, item)

        request = await self._submit_in_thread(prompt, sampling, speculation, request_id, timeout_s, sink)
        try:
            while True:
                item = await chunks.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._loop.cancel(request)

    async def _submit_in_thread(self, *arguments: object) -> Request:
        submitting = asyncio.ensure_future(asyncio.to_thread(self._submit, *arguments))  # pyright: ignore[reportArgumentType]
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            # The thread goes on; what it queues nobody will read.
            submitting.add_done_callback(lambda done: None if done.exception() else self._loop.cancel(done.result()))
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's; None where the checkpoint has none."""
        return self._loaded.tokenizer

    def encode(self, prompt: Prompt | str | Sequence[int]) -> list[int]:
        """The token ids that :meth:`generate` would start from. Raises InvalidRequest."""
        vocab = self.programs.decoder.valid_vocab
        return encode_prompt(Prompt.of(prompt), self.tokenizer, vocab=vocab, max_len=self._max_len)

    def abort(self, request_id: str) -> bool:
        """Ends a request with finish reason "abort". False when there is none of that id."""
        found = self._loop.find(request_id)
        for request in found:
            self._loop.cancel(request)
        return bool(found)

    def _submit(
        self,
        prompt: Prompt | str | Sequence[int],
        sampling: SamplingParams | None,
        speculation: SpeculationParams | None,
        request_id: str | None,
        timeout_s: float | None,
        sink: Callable[[Chunk | BaseException], None],
    ) -> Request:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        sampling = sampling or SamplingParams()
        speculation = speculation or SpeculationParams()
        self._loop.refuse_unless_open()
        sampling.validate(self.programs.decoder.valid_vocab)
        speculation.validate()
        tokenizer = self._loaded.tokenizer
        prompt_ids = self.encode(prompt)
        gamma = speculation.num_speculative_tokens
        if gamma is None:
            gamma = self._loaded.speculation.num_speculative_tokens
        if self._loaded.speculation.method == "none":
            gamma = 0
        stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._loaded.eos_ids))
        # A hidden special token shows no text, so a stop string that spells one must stop by its id.
        stop_ids |= set(() if tokenizer is None else tokenizer.stop_ids(sampling.stop))
        if sampling.stop and tokenizer is None:
            raise InvalidRequest("stop", sampling.stop, "no stop strings: this checkpoint has no tokenizer")
        room = self._max_len - len(prompt_ids)
        if sampling.min_tokens > room:
            raise InvalidRequest("min_tokens", sampling.min_tokens, f"at most {room}, what the prompt leaves")
        request = Request(
            request_id if request_id is not None else os.urandom(8).hex(),
            prompt_ids,
            sampling,
            gamma=gamma,
            lookup=speculation.lookup(self._loaded.speculation),
            seed=sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(8), "big"),
            stop_ids=sorted(stop_ids),
            max_length=len(prompt_ids) + min(sampling.max_tokens or room, room),
            method=self._loaded.speculation.method,
            # Where every step has one width, a rest saves nothing.
            rests=self.programs.decoder.drafter.is_lookup and self.programs.shapes.gammas[0] == 0,
            tokenizer=tokenizer,
            sink=sink,
            deadline=deadline,
        )
        self._loop.submit(request)
        return request

    # ---- what is going on ----------------------------------------------------------------------------------------

    def model_info(self) -> ModelInfo:
        """What is served."""
        manifest, tokenizer = self._loaded.checkpoint.manifest, self._loaded.tokenizer
        return ModelInfo(
            family=manifest.family,
            model_version=manifest.model_version,
            parameter_count=manifest.parameter_count,
            vocab_size=self.programs.decoder.valid_vocab,
            context_length=self._max_len,
            dtype=self._loaded.dtype,
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            has_tokenizer=tokenizer is not None,
            eos_token_ids=self._loaded.eos_ids,
        )

    def server_info(self) -> ServerInfo:
        """How it is served."""
        mesh = self.programs.decoder.target.sharding.mesh
        speculation = self._loaded.speculation
        try:
            installed = version("jaxspec")
        except PackageNotFoundError:
            installed = "unknown"
        return ServerInfo(
            version=installed,
            mesh=dict(mesh.shape),
            device_kind=mesh.devices.flat[0].device_kind,
            max_slots=self._max_slots,
            max_len=self._max_len,
            max_queue=self._max_queue,
            method=speculation.method,
            rejection_sample_method=speculation.rejection_sample_method,
            num_speculative_tokens=speculation.num_speculative_tokens,
            gamma_buckets=self.programs.shapes.gammas,
            deterministic=self.programs.decoder.by_position,
            prompt_lookup_max=speculation.prompt_lookup_max if speculation.looks_up else None,
            prompt_lookup_min=speculation.prompt_lookup_min if speculation.looks_up else None,
        )

    def loads(self) -> Loads:
        """What it is doing now."""
        return self._loop.loads()


class ChunkStream(Iterator[Chunk]):
    """The chunks of one request. Closing or dropping it aborts the request, also before the first chunk was read."""

    def __init__(self, chunks: "queue.SimpleQueue[Chunk | BaseException]", cancel: Callable[[], None]) -> None:
        self._chunks = chunks
        self._cancel = cancel
        self._ended = False

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        item = self._chunks.get()
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    def close(self) -> None:
        """Aborts the request unless it has ended; no chunk follows."""
        if not self._ended:
            self._ended = True
            self._cancel()

    def __del__(self) -> None:
        self.close()
