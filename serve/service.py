"""The methods of jaxspec.v1.Inference: requests in, the engine's chunks out, errors as statuses.

Every method gets the raw bytes of its request, so that a request that does not parse is refused by name like any other
mistake (the generated servicer would let gRPC answer INTERNAL).
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc
from google.protobuf.message import Message

from jaxspec.errors import InvalidRequest, JaxspecError, QueueFull, Unavailable
from serve import log, wire
from serve.metrics import Metrics
from serve.protos.jaxspec.v1 import inference_pb2 as pb
from serve.relay import coalesced

if TYPE_CHECKING:
    from jaxspec import Engine

TOKENS_PER_MESSAGE: Final = 512  # of merged chunks: clients accept messages of 4 MiB unless told otherwise
ABORT_RETRY_S: Final = 0.002
Context = grpc.aio.ServicerContext


class DuplicateRequestId(JaxspecError):
    """The client's request id names a request that is waiting or running."""


class Refusal(NamedTuple):
    """How an error is told to the client."""

    code: grpc.StatusCode
    message: str
    metadata: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, error: Exception) -> "Refusal":
        """The status for ``error``; anything unforeseen is INTERNAL and tells only its kind."""
        code = grpc.StatusCode
        match error:
            case InvalidRequest():
                return cls(code.INVALID_ARGUMENT, str(error), (("jaxspec-field", error.field),))
            case QueueFull():
                wait_ms = max(1, round(error.retry_after_s * 1000))
                return cls(code.RESOURCE_EXHAUSTED, str(error), (("retry-after-ms", str(wait_ms)),))
            case DuplicateRequestId():
                return cls(code.ALREADY_EXISTS, str(error))
            case Unavailable():
                return cls(code.UNAVAILABLE, str(error))
            case TimeoutError():
                return cls(code.DEADLINE_EXCEEDED, str(error) or "the deadline passed before the completion was done")
            case JaxspecError():
                return cls(code.INTERNAL, str(error))
            case _:
                return cls(code.INTERNAL, f"fault of the server: {type(error).__name__}")


class Service:
    """All methods over one engine. ``engine`` is None until the model is loaded; ``draining`` refuses new requests."""

    def __init__(self, metrics: Metrics, *, max_stream_s: float | None, max_request_bytes: int) -> None:
        self.engine: Engine | None = None
        self.draining = False
        self._metrics = metrics
        self.max_stream_s = max_stream_s
        self.max_request_bytes = max_request_bytes
        self._live: dict[str, bool] = {}  # request id -> whether the engine has sent something for it

    def handlers(self) -> grpc.GenericRpcHandler:
        """What ``grpc.aio.Server.add_generic_rpc_handlers`` takes."""
        return grpc.method_handlers_generic_handler(
            wire.SERVICE_NAME,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self._generate),
                "Abort": self._unary(pb.AbortRequest, self._abort),
                "GetModelInfo": self._unary(pb.GetModelInfoRequest, self._model_info),
                "GetServerInfo": self._unary(pb.GetServerInfoRequest, self._server_info),
                "GetLoads": self._unary(pb.GetLoadsRequest, self._loads),
            },
        )

    def _loaded(self) -> "Engine":
        if self.engine is None:
            raise Unavailable("the model is still loading")
        return self.engine

    def _accepting(self) -> "Engine":
        engine = self._loaded()
        if self.draining:
            raise Unavailable("the server is shutting down and takes no new requests")
        if not engine.ready:
            raise Unavailable("the engine is not ready: it is still compiling, or it has stopped")
        return engine

    async def _generate(self, data: bytes, context: Context) -> None:
        started = time.monotonic()
        outcome: dict[str, Any] = {"request_id": None}
        status = grpc.StatusCode.OK
        try:
            await self._stream(data, context, outcome)
        except asyncio.CancelledError:
            left = context.time_remaining()
            late = left is not None and left <= 0
            status = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            refusal = Refusal.of(error)
            status = refusal.code
            if status is grpc.StatusCode.INTERNAL:
                log.event("fault", level=logging.ERROR, exc_info=True, request_id=outcome["request_id"])
            outcome["message"] = refusal.message
            await context.abort(refusal.code, refusal.message, refusal.metadata)
        finally:
            self._metrics.request_ended(status.name)
            log.event("request", status=status.name, seconds=round(time.monotonic() - started, 3), **outcome)

    async def _stream(self, data: bytes, context: Context, outcome: dict[str, Any]) -> None:
        """Runs one request to its last chunk; fills ``outcome`` with what the log says about it."""
        request = wire.parse(pb.GenerateRequest, data)
        engine = self._accepting()
        call = wire.read_request(request, engine.model_info().vocab_size)
        request_id = outcome["request_id"] = call.request_id or f"gen-{uuid.uuid4().hex}"
        if request_id in self._live:
            raise DuplicateRequestId(f"request_id: expected one that is not in use, got {request_id!r}")
        limits = [limit for limit in (context.time_remaining(), self.max_stream_s) if limit is not None]
        timeout_s = min(limits, default=None)
        self._live[request_id] = False
        try:
            with _sending():
                await context.send_initial_metadata((("jaxspec-request-id", request_id),))
            stream = engine.stream(
                call.prompt, call.sampling, call.speculation, request_id=request_id, timeout_s=timeout_s
            )
            async with (
                asyncio.timeout(timeout_s),
                contextlib.aclosing(coalesced(stream, TOKENS_PER_MESSAGE)) as chunks,
            ):
                async for chunk in chunks:
                    self._live[request_id] = True
                    message = wire.write_chunk(chunk).SerializeToString()
                    with _sending():
                        await context.write(message)
                    if chunk.summary is not None:
                        self._metrics.completed(chunk.summary)
                        outcome |= {"finish_reason": chunk.finish_reason, **chunk.summary.as_dict()}
        finally:
            del self._live[request_id]

    def _unary(self, kind: type[Message], answer: Callable[[Any], Awaitable[Message]]) -> grpc.RpcMethodHandler:
        async def method(data: bytes, context: Context) -> bytes:
            try:
                return (await answer(wire.parse(kind, data))).SerializeToString()
            except Exception as error:
                refusal = Refusal.of(error)
                if refusal.code is grpc.StatusCode.INTERNAL:
                    log.event("fault", level=logging.ERROR, exc_info=True)
                await context.abort(refusal.code, refusal.message, refusal.metadata)
                raise AssertionError("abort raises") from error

        return grpc.unary_unary_rpc_method_handler(method)

    async def _abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        engine, request_id = self._loaded(), wire.checked_request_id(request.request_id)
        found = engine.abort(request_id)
        # A request that is still being tokenized is not in the engine yet; its abort must not be lost.
        while not found and self._live.get(request_id) is False:
            await asyncio.sleep(ABORT_RETRY_S)
            found = engine.abort(request_id)
        return pb.AbortResponse(found=found)

    async def _model_info(self, _: pb.GetModelInfoRequest) -> pb.ModelInfo:
        return wire.write_model_info(self._loaded().model_info())

    async def _server_info(self, _: pb.GetServerInfoRequest) -> pb.ServerInfo:
        info = wire.write_server_info(self._loaded().server_info())
        info.max_request_bytes = self.max_request_bytes
        if self.max_stream_s is not None:
            info.max_stream_s = self.max_stream_s
        return info

    async def _loads(self, _: pb.GetLoadsRequest) -> pb.Loads:
        return wire.write_loads(self._loaded().loads())


@contextlib.contextmanager
def _sending() -> Iterator[None]:
    """Around a send: gRPC reports a client that left meanwhile as an internal error of the send; it is a cancellation.

    The cancellation then leaves the handler as it came: a handler that returns normally leaks the call's native memory.
    """
    try:
        yield
    except Exception as error:
        raise asyncio.CancelledError("the client left") from error
