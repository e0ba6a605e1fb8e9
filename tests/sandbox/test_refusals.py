"""A kernel that refuses a fork, a namespace or a cgroup costs the session that was asked for, and no other."""

import asyncio
import errno
import os
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from sandbox import inside, syscalls
from sandbox.base import Unavailable
from sandbox.nursery import Nursery
from sandbox.zygote import ZygoteConfig, ZygoteSandbox


def refuse(number: int) -> Callable[..., Any]:
    def refused(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize(("call", "number"), [("unshare", errno.ENOSPC), ("fork", errno.EAGAIN)])
def test_the_zygote_outlives_a_refused_fork(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    restored: list[int] = []
    monkeypatch.setattr(syscalls, "unshare", lambda flags: None)
    monkeypatch.setattr(syscalls, "setns", lambda fd, flags: restored.append(fd))
    monkeypatch.setattr(syscalls if call == "unshare" else os, call, refuse(number))
    host, zygote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with host, zygote:
        inside._fork_session(zygote, channel=-1, own_namespace=77, config={})
        assert host.recv(16) == b"%d" % number
    assert restored == [77]


def test_the_host_hears_of_a_refused_fork_and_can_ask_again() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with subprocess.Popen(["sleep", "600"], stderr=subprocess.PIPE) as process, theirs:
            nursery = Nursery(process, ours)
            theirs.send(b"%d" % errno.EAGAIN)
            with pytest.raises(Unavailable, match="could not be made: Resource temporarily unavailable"):
                await nursery.fork(theirs)
            socket.send_fds(theirs, [b"pid"], [theirs.fileno()])
            os.close(await nursery.fork(theirs))
            process.kill()
            await nursery.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_cgroup_that_cannot_be_made_costs_one_session() -> None:
    async def scenario() -> None:
        sandbox = ZygoteSandbox(ZygoteConfig(warm_sessions=0, preload=()))
        await sandbox.start()
        try:
            if sandbox._cgroups is None:
                pytest.skip("no cgroup is writable here")
            first = await sandbox.open()
            while sandbox._ending:  # the session that proved the sandbox, whose process and pidfd go with it
                await asyncio.sleep(0.01)
            held, take = len(os.listdir("/proc/self/fd")), sandbox._cgroups.take
            sandbox._cgroups.take = refuse(errno.ENOSPC)  # type: ignore[method-assign]
            with pytest.raises(Unavailable, match=r"could not be made.*No space left"):
                await sandbox.open()
            sandbox._cgroups.take = take  # type: ignore[method-assign]
            while len(os.listdir("/proc/self/fd")) > held:  # a leak would make it wait for ever
                await asyncio.sleep(0.01)
            assert (await sandbox.exec(first, "1 + 1")).value == "2"
            assert (await sandbox.exec(await sandbox.open(), "1 + 1")).value == "2"
        finally:
            await sandbox.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))
