"""Between protocol messages and the engine's records, both ways: the server reads requests, the client reads chunks."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxspec.engine import records
from jaxspec.engine.params import Prompt, SamplingParams, SpeculationParams, refuse_beam_search
from jaxspec.errors import InvalidRequest
from serve.protos.jaxspec.v1 import inference_pb2 as pb

MessageT = TypeVar("MessageT", bound=Message)

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["Inference"].full_name
INT32_MAX: Final = 2**31 - 1
REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")
# Set by the fields' presence; the names are the same on both sides.
SAMPLING_SCALARS: Final = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "ignore_eos",
    "logprobs",
    "skip_special_tokens",
)
SPECULATION_SCALARS: Final = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


class Call(NamedTuple):
    """A GenerateRequest as the engine takes it. ``request_id`` is None when the client gave none."""

    prompt: Prompt
    sampling: SamplingParams
    speculation: SpeculationParams
    request_id: str | None


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """``data`` as a message of ``kind``.

    InvalidRequest when it does not parse (naming the string that is not UTF-8, where that is why) and for fields or
    enum values that this version does not know, since to ignore an option would change the answer.
    """
    try:
        message = kind.FromString(data)
    except DecodeError:
        for path, value in _not_utf8(kind, data):
            raise InvalidRequest(path, value, "UTF-8 text") from None
        raise InvalidRequest("request", data, f"a {kind.DESCRIPTOR.full_name} message") from None
    for path, value in _leaves(message):
        if isinstance(value, UnknownFieldSet):
            numbers = ", ".join(str(field.field_number) for field in value)
            raise InvalidRequest(path or "request", f"unknown field {numbers}", "fields that this server knows")
    return message


def _leaves(message: Message, path: str = "") -> Iterator[tuple[str, Any]]:
    """Scalars with the paths of their fields, and one UnknownFieldSet per message that has unknown fields."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        yield path, unknown
    for field, value in message.ListFields():
        here = f"{path}.{field.name}" if path else field.name
        entries = [(f"{here}[{i}]", entry) for i, entry in enumerate(value)] if field.is_repeated else [(here, value)]
        for name, entry in entries:
            if isinstance(entry, Message):
                yield from _leaves(entry, name)
            else:
                yield name, entry


@functools.cache
def _bytes_twin(full_name: str) -> type[Message]:
    """The same message with every string field as bytes, which parses what is not UTF-8."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    for kind in file.message_type:
        for field in kind.field:
            if field.type == field.TYPE_STRING:
                field.type = field.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))


def _not_utf8(kind: type[Message], data: bytes) -> Iterator[tuple[str, bytes]]:
    """String fields that are not UTF-8, with their paths; none when ``data`` does not parse for another reason."""
    try:
        message = _bytes_twin(kind.DESCRIPTOR.full_name).FromString(data)
    except DecodeError:
        return
    for path, value in _leaves(message):
        if isinstance(value, bytes):
            try:
                value.decode()
            except UnicodeDecodeError:
                yield path, value


def checked_request_id(request_id: str) -> str:
    """The id itself. InvalidRequest unless it is 1 to 128 printable ASCII characters without spaces."""
    if not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("request_id", request_id, "1 to 128 printable ASCII characters without spaces")
    return request_id


def read_request(request: pb.GenerateRequest, vocab_size: int) -> Call:
    """What the client asks for. InvalidRequest for all that can be refused without tokenizing."""
    kind = request.WhichOneof("input")
    prompt = Prompt(
        text=request.prompt if kind == "prompt" else None,
        ids=tuple(request.prompt_ids.ids) if kind == "prompt_ids" else None,
        chat=tuple((m.role, m.content) for m in request.chat.messages) if kind == "chat" else None,
    )
    prompt.validate(vocab_size)
    given = request.sampling
    if given.HasField("num_beams"):
        refuse_beam_search("num_beams", given.num_beams)
    sampling = SamplingParams(
        stop=tuple(request.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        **{name: getattr(given, name) for name in SAMPLING_SCALARS if given.HasField(name)},
    )
    sampling.validate(vocab_size)
    given = request.speculation
    speculation = SpeculationParams(
        **{name: getattr(given, name) for name in SPECULATION_SCALARS if given.HasField(name)}
    )
    speculation.validate()
    if request.content_type not in pb.ContentType.values():
        expected = "one of " + ", ".join(pb.ContentType.keys())
        raise InvalidRequest("content_type", int(request.content_type), expected)
    request_id = checked_request_id(request.request_id) if request.HasField("request_id") else None
    return Call(prompt, sampling, speculation, request_id)


def write_request(
    prompt: Prompt, sampling: SamplingParams, speculation: SpeculationParams, request_id: str | None
) -> pb.GenerateRequest:
    """The message that :func:`read_request` turns back into the same records."""
    request = pb.GenerateRequest(stop=sampling.stop)
    if prompt.text is not None:
        request.prompt = prompt.text
    if prompt.ids is not None:
        request.prompt_ids.ids.extend(prompt.ids)
        request.prompt_ids.SetInParent()
    if prompt.chat is not None:
        request.chat.messages.extend(pb.ChatMessage(role=role, content=content) for role, content in prompt.chat)
        request.chat.SetInParent()
    request.sampling.stop_token_ids.extend(sampling.stop_token_ids)
    for name in SAMPLING_SCALARS:
        value = getattr(sampling, name)
        if name in ("max_tokens", "min_tokens", "top_k") and value is not None:
            value = min(value, INT32_MAX)  # more than any context or vocabulary, which is what a larger number means
        if value is not None:
            setattr(request.sampling, name, value)
    for name in SPECULATION_SCALARS:
        if getattr(speculation, name) is not None:
            setattr(request.speculation, name, getattr(speculation, name))
    if request_id is not None:
        request.request_id = request_id
    return request


def write_chunk(chunk: records.Chunk) -> pb.GenerateChunk:
    """A chunk as a message."""
    message = pb.GenerateChunk(
        request_id=chunk.request_id,
        token_ids=chunk.token_ids,
        text=chunk.text,
        origins=[f"TOKEN_ORIGIN_{origin.upper()}" for origin in chunk.origins],
        text_ends=chunk.text_ends,
        logprobs=[_write_logprob(entry) for entry in chunk.logprobs or ()],
        finish_reason=f"FINISH_REASON_{(chunk.finish_reason or 'unspecified').upper()}",
    )
    if chunk.summary is not None:
        summary = chunk.summary.as_dict()
        message.usage.CopyFrom(pb.Usage(**summary["usage"]))
        message.timing.CopyFrom(pb.Timing(**summary["timing"]))
        message.speculation.CopyFrom(pb.SpeculationSummary(**summary["speculation"]))
        message.seed = summary["seed"]
    return message


def _write_logprob(entry: records.TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TokenLogprob.Alternative(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)


def read_chunk(message: pb.GenerateChunk, *, with_logprobs: bool) -> records.Chunk:
    """The chunk that :func:`write_chunk` wrote; ``with_logprobs``: the request asked for them."""
    finished = message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
    logprobs = tuple(
        records.TokenLogprob(entry.token_id, entry.logprob, tuple((a.token_id, a.logprob) for a in entry.top))
        for entry in message.logprobs
    )
    return records.Chunk(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        text=message.text,
        origins=tuple(_enum_word("TOKEN_ORIGIN_", pb.TokenOrigin.Name(origin)) for origin in message.origins),
        text_ends=tuple(message.text_ends),
        logprobs=logprobs if with_logprobs else None,
        finish_reason=_enum_word("FINISH_REASON_", pb.FinishReason.Name(message.finish_reason)) if finished else None,
        summary=_read_summary(message) if finished else None,
    )


def _enum_word(prefix: str, name: str) -> str:
    return name.removeprefix(prefix).lower()


def _read_summary(message: pb.GenerateChunk) -> records.Summary:
    def optional(name: str) -> float | None:
        return getattr(message.timing, name) if message.timing.HasField(name) else None

    counted = message.speculation
    return records.Summary(
        usage=records.Usage(message.usage.prompt_tokens, message.usage.completion_tokens),
        timing=records.Timing(optional("ttft_ms"), optional("tpot_ms"), optional("tokens_per_s")),
        speculation=records.SpeculationSummary(
            method=counted.method,
            num_spec_steps=counted.num_spec_steps,
            num_draft_tokens=counted.num_draft_tokens,
            num_accepted_draft_tokens=counted.num_accepted_draft_tokens,
            draft_acceptance_rate=counted.draft_acceptance_rate,
            mean_acceptance_length=counted.mean_acceptance_length,
            tokens_per_target_pass=counted.tokens_per_target_pass,
            acceptance_histogram=tuple(counted.acceptance_histogram),
        ),
        seed=message.seed,
    )


def _values(source: object, kind: type) -> dict[str, Any]:
    """The fields of the record ``kind``, read from a record or a message by name."""
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(kind)}


def write_model_info(info: records.ModelInfo) -> pb.ModelInfo:
    """The record as a message."""
    return pb.ModelInfo(**_values(info, records.ModelInfo))


def read_model_info(message: pb.ModelInfo) -> records.ModelInfo:
    """The record that :func:`write_model_info` wrote."""
    values = _values(message, records.ModelInfo)
    if not message.HasField("tokenizer_fingerprint"):
        values["tokenizer_fingerprint"] = None
    values["eos_token_ids"] = tuple(message.eos_token_ids)
    return records.ModelInfo(**values)


def write_server_info(info: records.ServerInfo) -> pb.ServerInfo:
    """The record as a message; the limits of the server itself are not part of it."""
    return pb.ServerInfo(**_values(info, records.ServerInfo))


def read_server_info(message: pb.ServerInfo) -> records.ServerInfo:
    """The record that :func:`write_server_info` wrote."""
    values = _values(message, records.ServerInfo)
    values |= {"mesh": dict(message.mesh), "gamma_buckets": tuple(message.gamma_buckets)}
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        values[name] = getattr(message, name) if message.HasField(name) else None
    return records.ServerInfo(**values)


def write_loads(loads: records.Loads) -> pb.Loads:
    """The record as a message."""
    values = _values(loads, records.Loads)
    values["counters"] = pb.Counters(**_values(loads.counters, records.Counters))
    return pb.Loads(**values)


def read_loads(message: pb.Loads) -> records.Loads:
    """The record that :func:`write_loads` wrote."""
    counters = _values(message.counters, records.Counters)
    counters["num_accepted_tokens_per_pos"] = tuple(message.counters.num_accepted_tokens_per_pos)
    counters["num_requests_finished"] = dict(message.counters.num_requests_finished)
    values = _values(message, records.Loads)
    values["counters"] = records.Counters(**counters)
    return records.Loads(**values)
