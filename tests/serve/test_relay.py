"""A slow reader gets everything, merged; closing either end closes the other (H10)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from jaxspec.engine.records import Chunk, TokenLogprob
from serve.relay import coalesced, merged


def piece(token: int) -> Chunk:
    text = f"t{token} "
    return Chunk("r", (token,), text, ("draft",), (len(text),), (TokenLogprob(token, -0.5),))


async def produce(count: int, closed: list[int], fails: bool = False) -> AsyncIterator[Chunk]:
    try:
        for token in range(count):
            yield piece(token)
            await asyncio.sleep(0)
        if fails:
            raise RuntimeError("the stream broke")
    finally:
        closed.append(count)


def test_merged_chunks_keep_each_tokens_share_of_the_text() -> None:
    both = merged(piece(7), merged(piece(11), Chunk("r", text="!", finish_reason="stop")))
    assert both.token_ids == (7, 11)
    assert both.text == "t7 t11 !"
    assert [both.text[a:b] for a, b in zip((0, *both.text_ends), both.text_ends, strict=False)] == ["t7 ", "t11 "]
    assert both.origins == ("draft", "draft")
    assert both.logprobs is not None
    assert [entry.token_id for entry in both.logprobs] == [7, 11]
    assert both.finish_reason == "stop"


def test_a_slow_reader_gets_every_token_in_few_bounded_chunks() -> None:
    closed: list[int] = []

    async def read() -> list[Chunk]:
        chunks = []
        async for chunk in coalesced(produce(100, closed), max_tokens=17):
            chunks.append(chunk)
            if len(chunks) == 1:
                while not closed:  # the producer is never held up by the reader
                    await asyncio.sleep(0.001)
        return chunks

    chunks = asyncio.run(read())
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(100))
    assert "".join(chunk.text for chunk in chunks) == "".join(piece(token).text for token in range(100))
    assert max(len(chunk.token_ids) for chunk in chunks) == 17
    assert len(chunks) <= 1 + 100 // 17 + 1


def test_an_error_comes_after_what_came_before_it() -> None:
    got: list[int] = []

    async def read() -> None:
        async for chunk in coalesced(produce(5, [], fails=True), max_tokens=3):
            got.extend(chunk.token_ids)

    with pytest.raises(RuntimeError, match="the stream broke"):
        asyncio.run(read())
    assert got == list(range(5))


def test_closing_the_reader_closes_the_stream() -> None:
    closed: list[int] = []

    async def read() -> None:
        chunks = coalesced(produce(10**9, closed), max_tokens=3)
        await anext(chunks)
        await chunks.aclose()
        assert closed == [10**9]

    asyncio.run(read())


def test_cancelling_the_reader_closes_the_stream() -> None:
    closed: list[int] = []

    async def read() -> None:
        async with contextlib.aclosing(coalesced(produce(10**9, closed), max_tokens=3)) as chunks:
            async for _ in chunks:
                await asyncio.sleep(0)

    async def main() -> None:
        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [10**9]

    asyncio.run(main())
