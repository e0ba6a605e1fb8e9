"""CPU time of a process and all below it, the ended ones included."""

import os
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root: int | None = None) -> float:
    """User and system seconds of `root` (default: this process) and its descendants so far.

    Of those that have ended, what their parents have waited for is counted.
    """
    root = os.getpid() if root is None else root
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                used[int(entry.name)] = sum(map(int, fields[11:15])) / _TICKS
    family, frontier = {root}, {root}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - family
        family |= frontier
    return sum(used.get(pid, 0.0) for pid in family)
