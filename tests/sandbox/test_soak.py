"""Many sessions opened and closed, some of them hostile or hanging: all are answered, and nothing is left over.

SANDBOX_SOAK_SESSIONS=2000 runs it at full length; with -s it prints what it counted.
"""

import asyncio
import contextlib
import os
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sandbox.base import Reason, SessionLost
from sandbox.client import SandboxClient
from tests.sandbox.conftest import Server

SESSIONS = int(os.environ.get("SANDBOX_SOAK_SESSIONS", "300"))
AT_ONCE, EVERY = 64, 20
WALL_S, GRACE_S = 1.0, 120.0  # the machine may be crowded; a request that hangs takes forever
CONFIG = {
    "max_sessions": 80,
    "warm_sessions": 4,
    "limits": {"memory_mb": 64, "tmp_mb": 4, "wall_s": 20.0, "max_processes": 8, "max_output_bytes": 2000},
}
HOSTILE = {
    "while True: pass": {Reason.TIMEOUT},
    "import signal\nsignal.pthread_sigmask(0, range(1, 65))\nwhile True: pass": {Reason.TIMEOUT},
    "import os\nwhile True:\n  try: os.fork(), os.setsid()\n  except OSError: pass": {Reason.TIMEOUT, Reason.MEMORY},
    "x = []\nwhile True: x.append(bytearray(b'x' * 10 ** 6))": {Reason.MEMORY},
    "import os; os.write(3, b'x' * 1000)": {Reason.EXIT},
    "import os; os._exit(0)": {Reason.EXIT},
    "while True: print('x' * 1000)": {Reason.OUTPUT},
    "import os\ntry:\n  for n in range(99): open(f'/tmp/{n}', 'wb').write(b'x' * 10 ** 6)\n"
    "except OSError as error: raise": {Reason.EXCEPTION},
}


@dataclass
class Counts:
    """What a server holds of the machine."""

    processes: int
    cgroups: int
    descriptors: int
    mounts: int
    temporary_files: int
    memory_mb: float


def counted(server: Server, folder: Path) -> Counts:
    proc = Path(f"/proc/{server.process.pid}")
    zygote = [Path(f"/proc/{pid}") for pid in server.descendants()[:2]]
    resident = re.search(r"^VmRSS:\s+(\d+)", (proc / "status").read_text(), re.MULTILINE)
    assert resident is not None
    return Counts(
        processes=len(server.descendants()),
        # made once and kept; those in use have processes
        cgroups=sum(bool(path.read_text()) for path in _cgroups(server, "s*/cgroup.procs")),
        descriptors=len(list((proc / "fd").iterdir())),
        mounts=sum((at / "mountinfo").read_text().count("\n") for at in zygote),  # what others mount is not counted
        temporary_files=len(list(folder.iterdir())),
        memory_mb=int(resident[1]) / 1024,
    )


def _cgroups(server: Server, pattern: str) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/agent-sandbox-{server.process.pid}/{pattern}"))


async def episode(client: SandboxClient, number: int) -> None:
    """One session, honest or hostile; every request within its limit, every answer the right one."""
    async with asyncio.timeout(GRACE_S):
        session = await client.open()
    for code, value in (
        (f"x = {number}", None),
        ("open('/tmp/x', 'w').write(str(x))", None),
        ("x + 1", str(number + 1)),
    ):
        async with asyncio.timeout(GRACE_S):
            result = await client.exec(session, code)
        assert (result.reason, result.value if "+" in code else None) == (Reason.OK, value), result
    if number % EVERY == 0:
        code, reasons = list(HOSTILE.items())[number // EVERY % len(HOSTILE)]
        async with asyncio.timeout(WALL_S + GRACE_S):
            result = await client.exec(session, code, WALL_S)
        assert result.reason in reasons | {Reason.TIMEOUT}, (code, result)  # on a crowded machine, time may end first
    async with asyncio.timeout(GRACE_S):
        with contextlib.suppress(SessionLost):
            await client.close_session(session)


async def all_episodes(url: str, number_of_them: int) -> None:
    room, client = asyncio.Semaphore(AT_ONCE), SandboxClient(url, open_wait_s=GRACE_S)

    async def one(number: int) -> None:
        async with room:
            await episode(client, number)

    async with asyncio.TaskGroup() as group:
        for number in range(number_of_them):
            group.create_task(one(number))
    await client.aclose()


def test_many_sessions_leave_nothing_behind(serve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    server, box = serve(CONFIG, TMPDIR=str(folder))

    def settled() -> Counts:
        """Counted once it stays the same, with the sessions kept warm complete again and the dead ones gone."""
        counts, deadline = counted(server, folder), time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            box.wait(asyncio.sleep(0.25))
            last, counts = counts, counted(server, folder)
            same = replace(counts, memory_mb=0) == replace(last, memory_mb=0)
            if same and counts.processes == 2 + CONFIG["warm_sessions"]:
                break
        return counts

    box.wait(all_episodes(server.url, AT_ONCE))  # what it keeps for its usual load is there from now on
    before = settled()
    box.wait(all_episodes(server.url, SESSIONS))
    after = settled()
    print(f"\n{SESSIONS} sessions, {AT_ONCE} at once\nbefore {asdict(before)}\nafter  {asdict(after)}")
    assert (after.processes, after.cgroups, after.mounts, after.temporary_files) == (
        before.processes,
        before.cgroups,
        before.mounts,
        before.temporary_files,
    )
    assert after.descriptors <= before.descriptors
    assert after.memory_mb < before.memory_mb + 24
    assert server.stop() == 0
    assert _cgroups(server, "") == []
    assert list(folder.iterdir()) == []
