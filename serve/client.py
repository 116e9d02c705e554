"""A small synchronous client: the engine's records in, the engine's records out."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxspec.engine.params import Prompt, SamplingParams, SpeculationParams
from jaxspec.engine.records import Chunk, Loads, ModelInfo, ServerInfo
from jaxspec.errors import JaxspecError
from serve import wire
from serve.protos.jaxspec.v1 import inference_pb2 as pb
from serve.protos.jaxspec.v1 import inference_pb2_grpc

ReplyT = TypeVar("ReplyT", bound=Message)
RESPONSE_BYTES_MAX: Final = 64 * 2**20


class CallFailed(JaxspecError):
    """A call that ended with a status other than OK."""

    def __init__(self, error: grpc.RpcError) -> None:
        call: Any = error  # a grpc.Call as well, which the type does not say
        self.code: grpc.StatusCode = call.code()
        self.message: str = call.details() or ""
        metadata = {str(key): str(value) for key, value in call.trailing_metadata() or ()}
        self.field: str | None = metadata.get("jaxspec-field")
        retry_ms = metadata.get("retry-after-ms")
        self.retry_after_s: float | None = None if retry_ms is None else int(retry_ms) / 1000
        super().__init__(f"{self.code.name}: {self.message}")


class Client:
    """One channel to a jaxspec-serve at ``addr`` (HOST:PORT). A context manager; every method may raise CallFailed.

    ``timeout_s`` is the deadline of a call in seconds; None is no deadline.
    """

    def __init__(self, addr: str) -> None:
        self._channel = grpc.insecure_channel(addr, options=[("grpc.max_receive_message_length", RESPONSE_BYTES_MAX)])
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt | str | Sequence[int],
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Chunk]:
        """Streams one completion; the call starts with the first chunk asked for, and closing the iterator cancels it.

        InvalidRequest at once for what can be refused without the server.
        """
        prompt, sampling, speculation = (
            Prompt.of(prompt),
            sampling or SamplingParams(),
            speculation or SpeculationParams(),
        )
        for part in (prompt, sampling, speculation):
            part.validate()
        request = wire.write_request(prompt, sampling, speculation, request_id)
        return self._chunks(request, timeout_s, with_logprobs=sampling.logprobs is not None)

    def _chunks(self, request: pb.GenerateRequest, timeout_s: float | None, *, with_logprobs: bool) -> Iterator[Chunk]:
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            for message in call:
                yield wire.read_chunk(message, with_logprobs=with_logprobs)
        except grpc.RpcError as error:
            raise CallFailed(error) from None
        finally:
            call.cancel()

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Ends a waiting or running request: its stream closes with finish reason abort. False: no such request."""
        return self._ask(self._stub.Abort, pb.AbortRequest(request_id=request_id), pb.AbortResponse, timeout_s).found

    def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """What is served."""
        message = self._ask(self._stub.GetModelInfo, pb.GetModelInfoRequest(), pb.ModelInfo, timeout_s)
        return wire.read_model_info(message)

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """How it is served."""
        message = self._ask(self._stub.GetServerInfo, pb.GetServerInfoRequest(), pb.ServerInfo, timeout_s)
        return wire.read_server_info(message)

    def loads(self, *, timeout_s: float | None = None) -> Loads:
        """What the server is doing now."""
        return wire.read_loads(self._ask(self._stub.GetLoads, pb.GetLoadsRequest(), pb.Loads, timeout_s))

    def serving(self, *, timeout_s: float | None = None) -> bool:
        """Whether the server takes requests (grpc.health.v1)."""
        request = health_pb2.HealthCheckRequest(service=wire.SERVICE_NAME)
        reply = self._ask(self._health.Check, request, health_pb2.HealthCheckResponse, timeout_s)
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    def wait_until_serving(self, timeout_s: float) -> None:
        """Returns once the server takes requests. TimeoutError when it does not within ``timeout_s`` seconds."""
        request = health_pb2.HealthCheckRequest(service=wire.SERVICE_NAME)
        call = self._health.Watch(request, timeout=timeout_s, wait_for_ready=True)
        try:
            for reply in call:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            failed = CallFailed(error)
            if failed.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise failed from None
        finally:
            call.cancel()
        raise TimeoutError(f"server: expected it to serve within {timeout_s} s")

    def _ask(self, method: Any, request: Message, kind: type[ReplyT], timeout_s: float | None) -> ReplyT:
        try:
            reply = method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise CallFailed(error) from None
        assert isinstance(reply, kind)
        return reply
