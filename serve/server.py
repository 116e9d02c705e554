"""The life of a server: bind, load, warm, serve, drain. Health tells which of these it is."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxspec.errors import UserError
from serve import log
from serve.metrics import Metrics
from serve.service import Service
from serve.wire import SERVICE_NAME

if TYPE_CHECKING:
    from jaxspec import Engine

SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
HEALTH_NAMES: Final = ("", SERVICE_NAME)
HEALTH_POLL_S: Final = 0.5
FLUSH_S: Final = 5.0  # for readers to take what is left, once the engine has stopped


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Limits and addresses of a server. UserError for values out of range."""

    host: str = "127.0.0.1"
    port: int = 50051  # 0: a free one
    metrics_port: int | None = None  # 0: a free one; None: no metrics endpoint
    drain_s: float = 30.0  # how long running requests may go on after SIGTERM, seconds
    max_stream_s: float | None = (
        3600.0  # a stream that lasts longer is ended, whatever its own deadline; None: no limit
    )
    max_request_bytes: int = 4 * 2**20
    min_ping_s: float = 5.0  # clients may ping as often as this, with or without calls

    def __post_init__(self) -> None:
        for name, port in (("port", self.port), ("metrics-port", self.metrics_port)):
            if port is not None and not 0 <= port <= 65535:
                raise UserError(f"{name}: expected 0 (a free one) to 65535, got {port}")
        if not 0 <= self.drain_s <= 86400:
            raise UserError(f"drain-s: expected 0 to 86400 seconds, got {self.drain_s}")
        if self.max_stream_s is not None and not 0 < self.max_stream_s <= 31 * 86400:
            raise UserError(
                f"max-stream-s: expected more than 0 and at most 31 days of seconds, got {self.max_stream_s}"
            )
        if not 1024 <= self.max_request_bytes <= 2**30:
            raise UserError(f"max-request-bytes: expected 1024 to 2**30, got {self.max_request_bytes}")


def channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    """Options of the gRPC core."""
    return [
        ("grpc.max_receive_message_length", options.max_request_bytes),
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share its clients
        # The core allows a ping in 5 minutes: a client that pings through a long prefill would meet a GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", round(options.min_ping_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client whose machine vanished answers no ping: its streams end, its slots come back.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


class Server:
    """A gRPC server around one engine. Use: ``start``, then ``attach`` a loaded engine, at the end ``stop``."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.metrics = Metrics(lambda: None if self.service.engine is None else self.service.engine.loads())
        self.service = Service(
            self.metrics, max_stream_s=options.max_stream_s, max_request_bytes=options.max_request_bytes
        )
        self.port = 0
        self.metrics_port: int | None = None
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]: set at run time
        self._grpc: grpc.aio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stop_metrics: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Binds the ports and answers health (NOT_SERVING) and reflection. UserError when a port is taken."""
        options = self.options
        server = grpc.aio.server(options=channel_options(options))
        server.add_generic_rpc_handlers((self.service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self._tell(NOT_SERVING)
        host = f"[{options.host}]" if ":" in options.host else options.host
        try:
            self.port = server.add_insecure_port(f"{host}:{options.port}")
        except RuntimeError as error:
            raise UserError(f"port: expected a free port on {options.host}, got {options.port} ({error})") from None
        if options.metrics_port is not None:
            try:
                self.metrics_port, self._stop_metrics = self.metrics.listen(options.host, options.metrics_port)
            except OSError as error:
                raise UserError(f"metrics-port: expected a free port, got {options.metrics_port} ({error})") from None
        await server.start()
        self._grpc = server
        log.event("listening", host=options.host, port=self.port, metrics_port=self.metrics_port)

    async def attach(self, engine: "Engine") -> None:
        """Takes a loaded engine; from here on health says whether it is ready."""
        self.service.engine = engine
        await self._tell(SERVING if engine.ready else NOT_SERVING)
        self._watch = asyncio.create_task(self._follow(engine))

    async def _follow(self, engine: "Engine") -> None:
        """Health goes with the engine: bad at once when its loop dies, though this process lives."""
        ready = engine.ready
        while True:
            await asyncio.sleep(HEALTH_POLL_S)
            if engine.ready != ready:
                ready = engine.ready
                await self._tell(SERVING if ready else NOT_SERVING)
                log.event("health", level=logging.INFO if ready else logging.ERROR, serving=ready)

    async def _tell(self, status: int) -> None:
        for name in HEALTH_NAMES:
            await self._health.set(name, status)

    async def drain(self) -> None:
        """Refuses new requests, lets running ones finish for up to ``drain_s`` seconds, ends the rest with "abort"."""
        self.service.draining = True
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        engine = self.service.engine
        if engine is not None:
            log.event("draining", running=engine.loads().running, seconds=self.options.drain_s)
            await asyncio.to_thread(engine.drain, self.options.drain_s)

    async def stop(self) -> None:
        """Drains, closes the engine and the ports. Safe to call at any time after ``start``."""
        await self.drain()
        if self._grpc is not None:
            await self._grpc.stop(FLUSH_S)
        if self.service.engine is not None:
            await asyncio.to_thread(self.service.engine.close)
        self._stop_metrics()
        log.event("stopped")


class _Stopped(Exception):
    """A signal came while the model was being loaded or compiled."""


async def run(options: ServerOptions, load: Callable[[], "Engine"]) -> None:
    """Serves until SIGTERM or SIGINT. ``load`` runs in a thread; its UserError ends the server.

    A second signal meets Python's default: it ends the process at once.
    """
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal(number: int) -> None:
        loop.remove_signal_handler(number)
        log.event("signal", signal=signal.Signals(number).name)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)

    def on_progress(what: str, done: int, total: int) -> None:
        if asked.is_set():
            raise _Stopped
        log.event("warmup", what=what, done=done, total=total)

    server = Server(options)
    await server.start()
    try:
        with contextlib.suppress(_Stopped):
            engine = await asyncio.to_thread(load)
            server.service.engine = engine
            if not asked.is_set():
                await asyncio.to_thread(engine.warmup, on_progress)
                await server.attach(engine)
                log.event("ready", host=options.host, port=server.port, metrics_port=server.metrics_port)
                await asked.wait()
    finally:
        await server.stop()
