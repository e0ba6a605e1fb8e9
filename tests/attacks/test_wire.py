"""A hostile session writes what it likes to its end of the channel: it can end only itself.

The host's side is run as it is, `Channel` over a real socket, with this test as the session; a shorter set goes
through a real server from inside a real session.
"""

import asyncio
import json
import socket
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.base import ExecResult, Reason
from sandbox.channel import BrokenChannel, Channel, Reply

LIMIT = 200
WAIT_S = 0.03
TRUE_REPLY = {
    "id": "asked",
    "stdout": "",
    "stderr": "",
    "value": None,
    "error": None,
    "reason": "ok",
    "truncated": False,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def framed(body: bytes, length: int | None = None) -> bytes:
    return struct.pack("!I", len(body) if length is None else length) + body


@st.composite
def replies(draw: st.DrawFn) -> bytes:
    """The true reply with fields changed, added or taken away."""
    reply: dict[str, Any] = dict(TRUE_REPLY)
    reply.update(draw(st.dictionaries(st.sampled_from([*TRUE_REPLY, "alive", "duration_s"]), JSON, max_size=3)))
    for name in draw(st.lists(st.sampled_from(list(TRUE_REPLY)), max_size=1)):
        del reply[name]
    return framed(json.dumps(reply).encode())


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A true reply of which bytes are changed, cut out or put in."""
    frame = bytearray(framed(json.dumps(TRUE_REPLY).encode()))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame)))
        frame[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(frame)


TRAFFIC = st.one_of(
    st.binary(max_size=300),
    replies(),
    mutated(),
    st.builds(framed, st.binary(max_size=100), st.integers(0, 2**32 - 1)),
    st.builds(lambda other: framed(json.dumps(TRUE_REPLY | {"id": other}).encode()), st.text(max_size=70)),
    st.builds(lambda n: framed(b"[" * n), st.integers(0, 30_000)),
    st.builds(lambda n: framed(json.dumps(TRUE_REPLY | {"stdout": "é" * n}).encode()), st.integers(0, 4 * LIMIT)),
)


async def answered(writes: list[bytes], early: bool, hang_up: bool) -> Reply | str:
    """What the host makes of a session that writes this, before or after it was asked; it must not wait any longer."""
    ours, theirs = socket.socketpair()
    broken: list[bool] = []
    channel = await Channel.connect(ours, LIMIT, lambda: broken.append(True))
    loop = asyncio.get_running_loop()
    theirs.setblocking(False)
    await loop.sock_sendall(theirs, framed(b'{"ready": true}'))
    assert (await channel.ready()).ready

    async def write() -> None:
        try:
            for piece in writes:
                await asyncio.wait_for(loop.sock_sendall(theirs, piece), WAIT_S)
                await asyncio.sleep(0)
            if hang_up:
                theirs.close()
        except OSError:
            pass  # the host has hung up

    try:
        if early:
            await write()
            await asyncio.sleep(0)
        writing = asyncio.create_task(write() if not early else asyncio.sleep(0))
        async with asyncio.timeout(WAIT_S):
            reply = await channel.request("asked", {"code": "1", "wall_s": 1.0})
        await writing
        return reply
    except BrokenChannel as error:
        assert broken == [True]
        assert not channel.whole
        return str(error)
    except TimeoutError:
        return "the call's limit"
    finally:
        channel.close()
        theirs.close()
        assert broken == [True]
        await asyncio.sleep(0)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TRAFFIC, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_the_host_takes_one_bounded_reply_or_ends_the_session(writes: list[bytes], early: bool, hang_up: bool) -> None:
    outcome = asyncio.run(answered(writes, early, hang_up))
    if isinstance(outcome, Reply):
        assert outcome.id == "asked"
        result = ExecResult(**outcome.model_dump(exclude={"id"}))
        assert all(len(text or "") <= LIMIT + 64 for text in (result.stdout, result.stderr, result.value))
        assert ExecResult.model_validate_json(result.model_dump_json()) == result  # it can be sent on


@pytest.mark.parametrize("early", [False, True])
def test_the_hosts_memory_is_bounded(early: bool) -> None:
    # a length that is never filled, and far more bytes than any reply has
    for writes in ([framed(b"x" * 100, 9000)], [framed(b"x" * 10_000_000)], [b"\xff" * 10_000_000]):
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        outcome = asyncio.run(answered(writes, early, False))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert isinstance(outcome, str)
        assert peak - before < 3_000_000


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TRAFFIC.filter(bool), min_size=1, max_size=3))
def test_from_inside_a_session_it_ends_only_itself(zygote: Any, writes: list[bytes]) -> None:
    session, other = zygote.open(), zygote.open()
    code = f"import os\nfor piece in {writes!r}: os.write(3, piece)"
    result = zygote.exec(session, code, 1.0)
    assert not result.alive  # its true reply comes on top of what it wrote
    assert result.reason in (Reason.EXIT, Reason.TIMEOUT)
    assert zygote.exec(other, "1 + 1").value == "2"
    zygote.end(other)


def test_a_session_that_does_not_read_is_killed_in_time(zygote: Any) -> None:
    session = zygote.open()
    zygote.exec(session, "import sandbox.inside as inside, time\ninside._read = lambda c: time.sleep(60)")
    # its frame has the old function; the module of `_serve` has the new one
    result = zygote.exec(session, "x = " + repr("x" * 900_000), 0.3)
    assert (result.reason, result.alive) == (Reason.TIMEOUT, False)
