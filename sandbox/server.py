"""The tool server: `python -m sandbox.server --help`. Flags, the listening line, and an end that leaves nothing."""

import argparse
import asyncio
import ipaddress
import os
import resource
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from sandbox.app import make_app
from sandbox.backends import make_sandbox, read_config
from sandbox.base import Unsupported
from sandbox.pool import SessionPool
from sandbox.zygote import ZygoteConfig

_KEEP_ALIVE_S = 120
_PARENT_POLL_S = 0.25


class _Server(uvicorn.Server):
    """uvicorn that says when it listens, ends sessions before connections, and leaves signals to us."""

    def __init__(self, config: uvicorn.Config, address: str, sandbox: SessionPool[Any]) -> None:
        super().__init__(config)
        self._address, self._sandbox = address, sandbox

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"sandbox: listening on {self._address}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._sandbox.stop()  # calls in flight are answered: their session is lost
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn would raise a captured signal again when it is done, before the sandbox is stopped
        yield


def main(arguments: list[str] | None = None) -> None:
    """Run the server until SIGTERM or SIGINT. Exit code 1 and one sentence on stderr if it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.server", description="Serve sandboxed Python over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; others than loopback need $SANDBOX_TOKEN")
    parser.add_argument("--port", type=int, default=8765, help="port to bind; 0 picks a free one")
    parser.add_argument("--config", type=Path, help="YAML of the backend, its `type` and keys; see sandbox/README.md")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the process that started this ends")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(_run(options, os.environ.get("SANDBOX_TOKEN") or None))
    except (Unsupported, ValueError, OSError) as error:
        sys.exit(f"sandbox: {error}")


async def _run(options: argparse.Namespace, token: str | None) -> None:
    parent = os.getppid()
    if token is None and not _is_loopback(options.host):
        raise ValueError(f"binding to {options.host} needs a token: set SANDBOX_TOKEN, for clients too")
    # two descriptors a session, and one a connection
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sandbox = make_sandbox(read_config(options.config) if options.config else ZygoteConfig())
    listener = _bind(options.host, options.port)
    try:
        await sandbox.start()
        host = f"[{options.host}]" if ":" in options.host else options.host
        server = _Server(_uvicorn_config(sandbox, token), f"http://{host}:{listener.getsockname()[1]}", sandbox)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
        watch = asyncio.create_task(_stop_with(parent, server)) if options.die_with_parent else None
        await server.serve([listener])
        if watch is not None:
            watch.cancel()
    finally:
        listener.close()
        await sandbox.stop()


def _uvicorn_config(sandbox: SessionPool[Any], token: str | None) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(sandbox, token),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )


async def _stop_with(parent: int, server: _Server) -> None:
    """Stop the server when its parent ends. It polls, as PR_SET_PDEATHSIG fires when the parent's thread ends."""
    while os.getppid() == parent:
        await asyncio.sleep(_PARENT_POLL_S)
    server.should_exit = True


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it every answer waits 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot bind to {host}:{port} ({error.strerror}); pick another --port, or 0") from error
    return listener


if __name__ == "__main__":
    main()
