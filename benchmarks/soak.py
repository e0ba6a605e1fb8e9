"""A run for N minutes at 64 concurrent episodes: memory, threads and file descriptors of every process, and slopes.

    python -m benchmarks.soak [--minutes 30] [--check] [key=value …]

Processes are this one and all below it: Ray's own, the rollout worker, the trainer, the tool server and its sessions.
Short-lived ones (sessions, verifiers) are taken together by name. Slopes are least squares over the last two thirds.
`--check` exits with 1 where a long-lived process gains over 10 threads or 20 descriptors in that time, or grows faster
than 60 MB a minute: what a leak of something per step or per episode looks like within minutes.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from agent_rl.config import load
from agent_rl.run import train

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
OVERRIDES = (
    *("num_steps=1000000", "batch.num_prompts=8", "batch.group_size=8", "rollout.max_concurrent_episodes=64"),
    *("eval.every=20", "eval.num_prompts=64", "checkpoint.every=10", "trainer.learning_rate=1e-9"),
)
EVERY_S = 2.0
WARM_UP = 3
"""Steps before the first sample: allocators grow while shapes are new."""
MOST_THREADS, MOST_DESCRIPTORS, MOST_MB_A_MINUTE = 10, 20, 60.0


class Sample(NamedTuple):
    """Of one process at one time: seconds since the start, MB, threads, open file descriptors.

    MB are resident and anonymous: pages of Ray's object store, which readers share, are no growth of theirs.
    """

    time: float
    megabytes: float
    threads: int
    descriptors: int


def family() -> list[int]:
    """This process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, frontier = {os.getpid()}, {os.getpid()}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return sorted(found)


def name_of(pid: int) -> str:
    if pid == os.getpid():
        return "driver"
    words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    if not words:
        return "(ended)"
    modules = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"]
    scripts = [Path(word).name for word in words[:4] if word.endswith(".py")]
    return (modules or scripts or [Path(words[0]).name])[0]


def sample(started: float, into: dict[int, list[Sample]], names: dict[int, str]) -> None:
    """Add a sample of every process, and its name now: Ray names its actors late."""
    for pid in family():
        with suppress(OSError, StopIteration):
            folder = Path(f"/proc/{pid}")
            status = (folder / "status").read_text().splitlines()
            kilobytes = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
            counts = len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir()))
            into[pid].append(Sample(time.monotonic() - started, kilobytes / 1e3, *counts))
            names[pid] = name_of(pid)


def soak(minutes: float, overrides: list[str]) -> tuple[dict[int, list[Sample]], dict[int, str], list[dict[str, Any]]]:
    """Run for so long and stop as Ctrl-C does; samples and names by process id, and the rows of the steps."""
    samples: dict[int, list[Sample]] = defaultdict(list)
    names: dict[int, str] = {}
    rows: list[dict[str, Any]] = []
    ended, started = threading.Event(), time.monotonic()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            if len(rows) > WARM_UP:
                sample(started, samples, names)

    def on_row(row: dict[str, Any]) -> None:
        rows.append(row)
        if time.monotonic() - started > 60 * minutes and not ended.is_set():
            ended.set()
            signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    with tempfile.TemporaryDirectory() as folder:
        train(load(CONFIG, [*OVERRIDES, *overrides]), Path(folder), False, on_row)
    thread.join()
    return samples, names, rows


def slope_a_minute(samples: list[Sample], values: list[float]) -> float:
    return 60 * float(np.polyfit([s.time for s in samples], values, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--check", action="store_true", help="exit with 1 on growth")
    parser.add_argument("overrides", nargs="*", help="keys of the config")
    arguments = parser.parse_args()
    samples, names, rows = soak(arguments.minutes, arguments.overrides)
    if not samples:
        sys.exit(f"fewer than {WARM_UP} steps in {arguments.minutes:g} minutes; give it more")
    begun, last = min(found[0].time for found in samples.values()), max(found[-1].time for found in samples.values())
    table = Table("process", "MB", "MB at end", "MB a minute", "threads", "at end", "descriptors", "at end")
    wrong = []
    for pid, found in sorted(samples.items(), key=lambda pair: names[pair[0]]):
        name = names[pid].split(".run")[0].split(".train")[0]
        kept = [s for s in found if s.time > begun + (last - begun) / 3]
        if len(kept) < 5 or kept[-1].time - kept[0].time < (last - begun) / 2:
            continue  # short-lived
        first, end = kept[0], kept[-1]
        growth = slope_a_minute(kept, [s.megabytes for s in kept])
        numbers = f"{first.megabytes:.0f}", f"{end.megabytes:.0f}", f"{growth:+.2f}"
        counts = f"{first.threads}", f"{end.threads}", f"{first.descriptors}", f"{end.descriptors}"
        table.add_row(f"{name} {pid}", *numbers, *counts)
        # Numbers go up and down with the sessions that are open; of a leak the least of them grows.
        early, late = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        more = min(s.threads for s in late) - min(s.threads for s in early) > MOST_THREADS
        more |= min(s.descriptors for s in late) - min(s.descriptors for s in early) > MOST_DESCRIPTORS
        if more or growth > MOST_MB_A_MINUTE:
            wrong.append(f"{name} {pid}")
    Console(width=130).print(table)
    steps = [row for row in rows if row["wall_s"] is not None]
    episodes = 64 * len(steps)
    print(f"{len(steps)} steps, {episodes} episodes trained on, in {last / 60:.1f} min; {len(samples)} processes seen")
    if arguments.check and wrong:
        sys.exit(f"grows: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
