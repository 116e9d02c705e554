"""Between an engine that produces steps and a reader that may be slow: nothing is dropped, what waits is merged."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator

from jaxspec.engine.records import Chunk


def merged(first: Chunk, second: Chunk) -> Chunk:
    """One chunk that carries what two neighbours carry."""
    shift = len(first.text)
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = (logprobs or ()) + second.logprobs
    return dataclasses.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        origins=first.origins + second.origins,
        text_ends=first.text_ends + tuple(end + shift for end in second.text_ends),
        logprobs=logprobs,
    )


async def coalesced(stream: AsyncIterator[Chunk], max_tokens: int) -> AsyncGenerator[Chunk, None]:
    """The chunks of ``stream``; those that the reader is too slow for are merged, up to ``max_tokens`` each.

    The stream is read as fast as it comes, so a slow reader holds memory (at most one context of tokens) but never a
    slot. An error of the stream is raised after what came before it. Closing this generator closes the stream.
    """
    waiting: deque[Chunk] = deque()
    changed = asyncio.Event()

    async def read() -> None:
        async for chunk in stream:
            if waiting and len(waiting[-1].token_ids) + len(chunk.token_ids) <= max_tokens:
                waiting[-1] = merged(waiting[-1], chunk)
            else:
                waiting.append(chunk)
            changed.set()

    reader = asyncio.create_task(read())
    reader.add_done_callback(lambda _: changed.set())
    try:
        while True:
            await changed.wait()
            changed.clear()
            while waiting:
                yield waiting.popleft()
            if reader.done():
                break
        await reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()
