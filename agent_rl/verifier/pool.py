"""Processes that verify answers: started when first needed, reused, killed and replaced when one hangs or dies."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from pydantic import Field

from agent_rl.settings import Settings
from agent_rl.verifier.compare import Question

_SCRIPT = Path(__file__).with_name("judge.py")
_STARTUP_S = 300.0  # a process that dies is seen at once; this ends one that hangs
_HUNG = "hung"
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME")


class PoolConfig(Settings):
    """The processes that run math-verify, for each rollout worker, and what one answer may cost."""

    num_processes: int = Field(2, ge=1)
    """Answers verified at once; the processes are started at the first answer that needs one."""
    cpu_s: float = Field(1.0, gt=0)
    """Processor seconds an answer may take; beyond, the process is killed and the answer is unverifiable."""
    wall_s: float = Field(10.0, gt=0)
    """Wall seconds after which a process that has not used up `cpu_s` counts as hung: it is killed, and the answer is
    tried once more on another, since a crowded machine can be the cause. Waiting for a free process does not count."""
    memory_mb: int = Field(512, ge=128)
    """Address space of a process, the libraries (about 70 MB) included."""


class VerifierProcess:
    """One process and the socket to it. After a reply of timeout, hung, crash or memory, close it."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(_SCRIPT), str(theirs.fileno())]
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(config.cpu_s), str(config.memory_mb << 20)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**environment, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the run, which finishes its step with verified answers
            )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_up(self) -> bool:
        return self._streams is not None

    async def ask(self, question: Question) -> str:
        """correct, wrong, or the reason why there is no verdict: timeout, hung, memory, crash, unreadable, error: …"""
        reader, writer = await self.ready()
        line = {"reference": question.reference, "answer": question.answer, "ordered": question.ordered}
        try:
            async with asyncio.timeout(self._config.wall_s):
                writer.write(json.dumps(line).encode() + b"\n")
                return str(json.loads(await reader.readuntil()))
        except TimeoutError:
            return _HUNG
        except (asyncio.IncompleteReadError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)  # its socket is closed: it is ending
            return "timeout" if self._process.returncode == -signal.SIGPROF else "crash"

    async def ready(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Its streams, once it has warmed up. Raises `RuntimeError` if it does not start."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._socket)
            try:
                async with asyncio.timeout(_STARTUP_S):
                    await self._streams[0].readuntil()
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                self.close()
                status = self._process.returncode
                raise RuntimeError(
                    f"a verifier process did not start (exit status {status}); its standard error says why"
                ) from None
        return self._streams

    def close(self) -> None:
        """Kill it, if it still lives, and wait for its end."""
        self._process.kill()
        self._process.wait()
        if self._streams is not None:
            self._streams[1].close()
        self._socket.close()


class VerifierPool:
    """Up to `num_processes` verifier processes. For one event loop; starts nothing until it is asked."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.num_replaced = 0
        self._slots = asyncio.Semaphore(config.num_processes)
        self._idle: list[VerifierProcess] = []
        self._busy: set[VerifierProcess] = set()
        self._started = False

    @property
    def processes(self) -> list[int]:
        """Process ids, those at work included."""
        return [process.pid for process in (*self._idle, *self._busy)]

    def _take(self) -> VerifierProcess:
        """An idle process; one that is up is preferred to one that is still starting."""
        if not self._started:
            self._idle = [VerifierProcess(self.config) for _ in range(self.config.num_processes)]
            self._started = True
        self._idle.sort(key=lambda process: process.is_up)
        return self._idle.pop()

    async def ask(self, question: Question) -> str:
        """correct, wrong, or why there is no verdict. Raises `RuntimeError` if no process can be started."""
        async with self._slots:
            reply = await self._ask_one(question)
            if reply == _HUNG:
                reply = await self._ask_one(question)
            return "timeout" if reply == _HUNG else reply

    async def _ask_one(self, question: Question) -> str:
        """What one process says, which is replaced if it is of no further use."""
        process = self._take()
        self._busy.add(process)
        sound = False
        try:
            reply = await process.ask(question)
            sound = reply not in ("timeout", _HUNG, "crash", "memory")
        finally:  # a cancelled question may still be answered later: its process is not used again either
            self._busy.remove(process)
            if not sound:
                process.close()
                self.num_replaced += 1
                process = VerifierProcess(self.config)  # it starts while nobody waits for it
            self._idle.append(process)
        return reply

    async def close(self) -> None:
        """Kill the processes. Nothing may be waiting for an answer."""
        while self._idle:
            self._idle.pop().close()
        self._started = False
