"""The processes that this one, or another, has started: for tests that kill some of them."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path


def descendants(root: int) -> dict[int, str]:
    """Command line by process id, of every living process below `root`."""
    parents, commands = dict[int, int](), dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if status[0] != "Z":
            parents[int(folder.name)] = int(status[1])
    found: set[int] = set()
    while new := {pid for pid, parent in parents.items() if parent in found | {root}} - found:
        found |= new
    return {pid: commands[pid] for pid in found}


def kill_one(name: str, root: int | None = None) -> int:
    """Kill -9 the first process below `root` (this process) whose command line contains `name`; returns its id."""
    pid = min(pid for pid, command in descendants(root or os.getpid()).items() if name in command)
    os.kill(pid, signal.SIGKILL)
    return pid


def kill_later(name: str, delay_s: float) -> Callable[[], None]:
    """`kill_one` after `delay_s`, or when what is returned is called if that comes first; it returns after the kill."""
    due = threading.Event()

    def wait_and_kill() -> None:
        due.wait(delay_s)
        kill_one(name)

    thread = threading.Thread(target=wait_and_kill)
    thread.start()

    def at_the_latest() -> None:
        due.set()
        thread.join()

    return at_the_latest
