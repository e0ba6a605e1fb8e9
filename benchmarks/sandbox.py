"""The sandbox against what it replaces, as ratios of things measured in one run.

Opening a session against a fresh `python3` that imports sympy, and against a Docker session where a daemon
answers; `1 + 1` over HTTP against a no-op request to the same server; memory of an idle session; open, exec and
close cycles a second. Opens that wait for a fork ("cold") and opens served from the sessions kept ready ("warm")
are shown apart. Usage: python -m benchmarks.sandbox [--quick] [--others]

--others also measures llm-sandbox and jupyter_client, which it installs into a virtual environment of its own.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from sandbox.client import SandboxClient
from sandbox.zygote import ZygoteConfig

LIGHT = ("math", "fractions", "itertools", "random", "collections", "re")
HEAVY = ZygoteConfig().preload
CLIENTS = (1, 8, 64)
SPIN = """
import os
try:
    while os.fork():
        pass
    os.setsid()
except OSError:
    pass
while True:
    pass
"""
JUPYTER = """
import time
from jupyter_client.manager import start_new_kernel
started = time.perf_counter()
manager, client = start_new_kernel()
client.execute_interactive("1 + 1", output_hook=lambda m: None)
print(time.perf_counter() - started)
times = []
for _ in range(50):
    started = time.perf_counter()
    client.execute_interactive("1 + 1", output_hook=lambda m: None)
    times.append(time.perf_counter() - started)
print(sorted(times)[len(times) // 2])
client.stop_channels(); manager.shutdown_kernel(now=True)
"""
LLM_SANDBOX = """
import time
from llm_sandbox import SandboxSession
started = time.perf_counter()
session = SandboxSession(lang="python"); session.open()
print(time.perf_counter() - started)
started = time.perf_counter(); session.run("print(1 + 1)"); print(time.perf_counter() - started)
session.close()
"""


@dataclass
class Figures:
    """Rows of the tables; times in milliseconds."""

    times: list[tuple[str, float, float]] = field(default_factory=list)
    ratios: list[tuple[str, float, str]] = field(default_factory=list)
    others: list[tuple[str, str]] = field(default_factory=list)

    def time(self, name: str, milliseconds: list[float]) -> float:
        """Record a time's median and 99th percentile; the median."""
        ordered = sorted(milliseconds)
        self.times.append((name, median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]))
        return median(ordered)


@contextmanager
def served(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """A tool server with this config: its address and process id."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        command = [sys.executable, "-m", "sandbox.server", "--port", "0", "--config", file.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            try:
                yield line.removeprefix("sandbox: listening on ").strip(), process.pid
            finally:
                process.terminate()


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await call()
    return 1000 * (time.perf_counter() - started)


def fresh_python(rounds: int) -> list[float]:
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import sympy"], check=True)
        times.append(1000 * (time.perf_counter() - started))
    return times[1:]  # the first fills the page cache


async def opens(url: str, rounds: int, first_code: str, pause_s: float) -> tuple[list[float], list[float]]:
    """Milliseconds of an open, and of a first exec of `first_code` in the new session."""
    client = SandboxClient(url)
    opened, ran = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        session = await client.open()
        opened.append(1000 * (time.perf_counter() - started))
        started = time.perf_counter()
        await client.exec(session, first_code)
        ran.append(1000 * (time.perf_counter() - started))
        await client.close_session(session)
        await asyncio.sleep(pause_s)
    await client.aclose()
    return opened, ran


async def requests(url: str, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of `1 + 1` and of a no-op request, in turns, over one connection."""
    client = SandboxClient(url)
    session = await client.open()
    execs, noops = [], []
    for _ in range(rounds):
        execs.append(await timed(lambda: client.exec(session, "1 + 1")))
        noops.append(await timed(client.health))
    await client.close_session(session)
    await client.aclose()
    return execs, noops


async def cycles_per_second(url: str, clients: int, seconds: float) -> float:
    client, end, done = SandboxClient(url), time.monotonic() + seconds, 0

    async def cycle() -> None:
        nonlocal done
        while time.monotonic() < end:
            session = await client.open()
            await client.exec(session, "1 + 1")
            await client.close_session(session)
            done += 1

    started = time.monotonic()
    await asyncio.gather(*(cycle() for _ in range(clients)))
    await client.aclose()
    return done / (time.monotonic() - started)


async def idle_session_mb(url: str, pid: int, sessions: int) -> float:
    """Mean proportional set size, in MB, of sessions that have run one line."""
    client = SandboxClient(url)
    ids = [await client.open() for _ in range(sessions)]
    for session in ids:
        await client.exec(session, "1 + 1")
    sizes = []
    for process in _descendants(pid)[2:]:  # bubblewrap and the zygote come first
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
        assert found is not None
        sizes.append(int(found[1]) / 1024)
    for session in ids:
        await client.close_session(session)
    await client.aclose()
    return sum(sizes) / len(sizes)


def _descendants(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, frontier = [], [pid]
    while frontier:
        frontier = sorted(child for child, parent in parents.items() if parent in frontier)
        found += frontier
    return found


def measure_preload(
    figures: Figures, name: str, preload: tuple[str, ...], rounds: int, fresh: float
) -> tuple[float, float]:
    """An open, first use of sympy and cycles with these modules preloaded; the open's median, cold and warm, in ms."""
    with served({"preload": preload, "warm_sessions": 0}) as (url, _):
        opened, _ = asyncio.run(opens(url, rounds, "1 + 1", 0.0))
        _, ran = asyncio.run(opens(url, max(5, rounds // 10), "import sympy; sympy.Integer(1)", 0.0))
        cold, first = figures.time(f"open, cold, {name}", opened), figures.time(f"first use of sympy, {name}", ran)
        figures.ratios.append((f"fresh python3 importing sympy / open, cold, {name}", fresh / cold, "20"))
        figures.ratios.append((f"the same / open, cold, and first use of sympy, {name}", fresh / (cold + first), ""))
    with served({"preload": preload, "warm_sessions": 8}) as (url, pid):
        opened, ran = asyncio.run(opens(url, rounds, "1 + 1", 0.05))
        warm = figures.time(f"open, warm, {name}", opened)
        figures.ratios.append((f"fresh python3 importing sympy / open, warm, {name}", fresh / warm, "20"))
        rates = [asyncio.run(cycles_per_second(url, clients, rounds / 10)) for clients in CLIENTS]
        named = ", ".join(f"{rate:.0f} at {clients}" for rate, clients in zip(rates, CLIENTS, strict=True))
        figures.others.append((f"open, exec and close cycles a second, by clients, {name}", named))
        figures.others.append(
            (f"PSS of an idle session, {name} (at most 4 MB)", f"{asyncio.run(idle_session_mb(url, pid, 32)):.1f} MB")
        )
    return cold, warm


def measure_requests(figures: Figures, rounds: int) -> None:
    with served({}) as (url, _):
        execs, noops = asyncio.run(requests(url, 20 * rounds))
    ratio = figures.time("1 + 1 over HTTP", execs) / figures.time("GET /health, a no-op", noops)
    figures.ratios.append(("1 + 1 over HTTP / no-op request (at most)", ratio, "2"))


def measure_starvation(figures: Figures, rounds: int) -> None:
    """`1 + 1` of one session while another spins in as many detached processes as it may have."""

    async def both(url: str) -> tuple[list[float], list[float]]:
        client = SandboxClient(url)
        honest, greedy = await client.open(), await client.open()
        alone = [await timed(lambda: client.exec(honest, "1 + 1")) for _ in range(rounds)]
        spinning = asyncio.create_task(client.exec(greedy, SPIN, 10.0))
        await asyncio.sleep(0.5)
        beside = []
        while len(beside) < rounds and not spinning.done():
            beside.append(await timed(lambda: client.exec(honest, "1 + 1")))
        await client.close_session(greedy)
        await asyncio.gather(spinning, return_exceptions=True)
        await client.close_session(honest)
        await client.aclose()
        return alone, beside

    with served({}) as (url, _):
        alone, beside = asyncio.run(both(url))
    ratio = figures.time("1 + 1 beside a session that spins", beside) / median(alone)
    figures.ratios.append(("1 + 1 beside a session that spins in 16 processes / alone", ratio, "a few"))


def measure_docker(figures: Figures, rounds: int, cold_ms: float, warm_ms: float) -> None:
    """A Docker session's open from nothing, through the same server; skipped with a sentence where it cannot be."""
    try:
        import docker

        docker.from_env(timeout=5).ping()
    except Exception as error:  # whatever the SDK says, there is none to measure
        figures.others.append(("Docker", f"skipped: no daemon answers ({type(error).__name__})"))
        return
    with served({"type": "docker", "warm_sessions": 0}) as (url, _):
        if not url:
            figures.others.append(("Docker", "skipped: its server did not start; the reason is above"))
            return
        opened, _ = asyncio.run(opens(url, max(3, rounds // 10), "1 + 1", 0.0))
    docker_ms = figures.time("open, cold, Docker", opened)
    figures.ratios.append(("open, cold, Docker / open, warm", docker_ms / warm_ms, "40"))
    figures.ratios.append(("open, cold, Docker / open, cold", docker_ms / cold_ms, ""))


def measure_others(figures: Figures) -> None:
    """llm-sandbox and jupyter_client: open and one exec, each by its own API, in a throwaway environment."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        for name, packages, code in (
            ("jupyter_client", ["jupyter_client", "ipykernel"], JUPYTER),
            ("llm-sandbox", ["llm-sandbox[docker]"], LLM_SANDBOX),
        ):
            try:
                subprocess.run([python, "-m", "pip", "install", "-qqq", *packages], check=True, timeout=300)
                said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, timeout=120)
                opened, ran = (1000 * float(line) for line in said.stdout.split()[:2])
                figures.others.append((name, f"open {opened:.0f} ms, 1 + 1 {ran:.1f} ms"))
            except (subprocess.SubprocessError, ValueError) as error:
                figures.others.append((name, f"skipped: it does not run here ({type(error).__name__})"))


def report(figures: Figures) -> None:
    times = Table("milliseconds", "p50", "p99")
    for name, middle, high in figures.times:
        times.add_row(name, f"{middle:.2f}", f"{high:.2f}")
    ratios = Table("ratio", "measured", "target")
    for name, ratio, target in figures.ratios:
        ratios.add_row(name, f"{ratio:.1f}", target)
    rest = Table("also", "")
    for row in figures.others:
        rest.add_row(*row)
    for table in (times, ratios, rest):
        Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--others", action="store_true", help="also llm-sandbox and jupyter_client")
    options = parser.parse_args()
    rounds, figures = (10 if options.quick else 100), Figures()
    fresh = figures.time("fresh python3, import sympy", fresh_python(max(3, rounds // 10)))
    cold_ms, warm_ms = measure_preload(figures, "sympy and numpy preloaded (default)", HEAVY, rounds, fresh)
    measure_preload(figures, "not preloaded", LIGHT, rounds, fresh)
    measure_requests(figures, rounds)
    measure_starvation(figures, 5 * rounds)
    measure_docker(figures, rounds, cold_ms, warm_ms)
    if options.others:
        measure_others(figures)
    report(figures)


if __name__ == "__main__":
    main()
