"""The HTTP client of the SGLang engine, against small servers that misbehave as real ones do."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from agent_rl.rollout.engines.base import EngineError
from agent_rl.rollout.sglang.client import Client, RefusedError, UnreachableError

OK = b'HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{"a":1}'


def against(answers: list[bytes | None], body: Callable[[Client], Awaitable[None]]) -> int:
    """Run `body` against a server that gives connection by connection the answers; None hangs up instead.

    A connection stays open until an answer is None. Returns how many connections were made.
    """
    made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client is done
            while await reader.readuntil(b"\r\n\r\n"):
                answer = answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await body(client)
            await client.close()
            await asyncio.sleep(0.05)  # its connections end too

    asyncio.run(main())
    return made


def test_a_connection_is_used_again_and_replaced_where_the_server_had_closed_it() -> None:
    async def body(client: Client) -> None:
        for _ in range(3):
            assert await client.get("/x", 5) == {"a": 1}

    assert against([OK, OK, None, OK], body) == 2


def test_a_server_that_hangs_up_on_a_new_connection_is_unreachable() -> None:
    async def body(client: Client) -> None:
        with pytest.raises(UnreachableError, match="cannot be reached"):
            await client.get("/x", 5)

    assert against([None], body) == 1


def test_refusals_failures_and_silence_are_told_apart() -> None:
    refused = b'{"error": {"message": "too big"}}'
    failed = b'{"message": "out of memory"}'
    answers = [
        b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n%b" % (len(refused), refused),
        b"HTTP/1.1 500 Bad\r\ncontent-length: %d\r\n\r\n%b" % (len(failed), failed),
        b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n",
    ]

    async def body(client: Client) -> None:
        with pytest.raises(RefusedError, match="refused /x: too big"):
            await client.get("/x", 5)
        with pytest.raises(EngineError, match="out of memory") as failure:
            await client.get("/x", 5)
        assert not isinstance(failure.value, UnreachableError)
        with pytest.raises(UnreachableError, match="in time"):
            await client.get("/x", 0.2)

    assert against(answers, body) == 1


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="like http://127"):
        Client("localhost:30000")
