"""Memory, process and CPU limits by cgroup, where one is writable: v2, v1, or both mixed.

The CPU controller is used where it is there: a session then gets the share of one process, however many it
starts, and at most one CPU. Cgroups are made once and reused, since making and removing them is slow. Each
`Slot` is one session's.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "agent-sandbox-"
_CONTROLLERS, _OPTIONAL = ("memory", "pids"), "cpu"
_FILES = {
    1: {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpu": "cpu.cfs_quota_us"},
    2: {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"},
}
_PERIOD_US = 100_000  # the kernel's default; this much CPU time a period is one CPU


@dataclass
class Slot:
    """One cgroup (v2), or one a controller (v1), for one session at a time."""

    directories: dict[str, Path]
    version: int
    kills_before: int = 0

    def add(self, pid: int) -> None:
        """Move a process in; what it forks later follows it."""
        for directory in set(self.directories.values()):
            (directory / "cgroup.procs").write_text(str(pid))
        self.kills_before = self._kills()

    def out_of_memory(self) -> bool:
        """Whether the kernel killed for memory in here since the last `add`."""
        return self._kills() > self.kills_before

    def _kills(self) -> int:
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)", (self.directories["memory"] / name).read_text(), re.MULTILINE)
            return int(found[1]) if found else 0
        return 0


class Cgroups:
    """A growing set of slots below one directory of this server's own."""

    def __init__(self, memory_mb: int, max_processes: int) -> None:
        """Raises `OSError` if no cgroup with the memory and pids controllers can be made here."""
        self._limits = {"memory": str(memory_mb << 20), "pids": str(max_processes), "cpu": str(_PERIOD_US)}
        self._free: list[Slot] = []
        self._made = 0
        self.version, self._parents = _make_parents()
        try:
            self._free.append(self._make())
        except OSError:
            self.remove()
            raise

    def take(self) -> Slot:
        return self._free.pop() if self._free else self._make()

    def give_back(self, slot: Slot) -> None:
        """The session has ended: the slot may be used again."""
        self._free.append(slot)

    def remove(self) -> None:
        """Remove all directories; every process in them must have ended."""
        for parent in set(self._parents.values()):
            _remove_tree(parent)

    def _make(self) -> Slot:
        directories = {name: parent / f"s{self._made}" for name, parent in self._parents.items()}
        for name, directory in directories.items():
            directory.mkdir(exist_ok=True)
            file = directory / _FILES[self.version][name]
            if name in _CONTROLLERS or file.exists():  # a kernel can be built with CPU shares and without quotas
                file.write_text(self._limits[name])
        swap = directories["memory"] / ("memory.swap.max" if self.version == 2 else "memory.memsw.limit_in_bytes")
        if swap.exists():
            swap.write_text("0" if self.version == 2 else self._limits["memory"])
        self._made += 1  # only now: what is left of a failure is used again
        return Slot(directories, self.version)


def _mounts() -> tuple[Path | None, dict[str, Path]]:
    """The mount points of cgroup v2 and of each v1 controller."""
    unified, controllers = None, {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2":
            unified = Path(point)
        elif kind == "cgroup":
            wanted = (*_CONTROLLERS, _OPTIONAL)
            controllers.update({name: Path(point) for name in options.split(",") if name in wanted})
    return unified, controllers


def _own_paths() -> dict[str, str]:
    """This process's cgroup for each v1 controller, and for v2 under the empty name."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return {name: path for _, names, path in lines for name in names.split(",")}


def _make_parents() -> tuple[int, dict[str, Path]]:
    unified, controllers = _mounts()
    own = _own_paths()
    if all(name in controllers for name in _CONTROLLERS):
        made = {name: _make_below(controllers[name], own.get(name, "/"), ()) for name in _CONTROLLERS}
        if _OPTIONAL in controllers:
            with contextlib.suppress(OSError):
                made[_OPTIONAL] = _make_below(controllers[_OPTIONAL], own.get(_OPTIONAL, "/"), ())
        return 1, made
    if unified is None:
        raise OSError("no cgroup file system is mounted")
    parent = _make_below(unified, own.get("", "/"), _CONTROLLERS)
    return 2, dict.fromkeys((*_CONTROLLERS, *_enable(parent, _OPTIONAL)), parent)


def _enable(parent: Path, controller: str) -> tuple[str, ...]:
    """The controller, if the cgroups below `parent` may have it."""
    try:
        (parent / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError:
        return ()
    return (controller,)


def _make_below(mount: Path, own: str, delegate: tuple[str, ...]) -> Path:
    """Our directory below this process's own cgroup or the nearest ancestor that allows one."""
    start = mount / own.lstrip("/")
    error = OSError(f"no writable cgroup below {mount}")
    for candidate in (start, *start.parents):
        if not candidate.is_relative_to(mount):
            break
        made = candidate / f"{_PREFIX}{os.getpid()}"
        try:
            _sweep(candidate)
            made.mkdir()
            if delegate:
                (made / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in delegate))
            return made
        except OSError as failed:
            error = failed
            with contextlib.suppress(OSError):
                made.rmdir()
    raise error


def _sweep(directory: Path) -> None:
    """Remove what a server that was killed left behind."""
    for old in directory.glob(f"{_PREFIX}*"):
        if not Path(f"/proc/{old.name.removeprefix(_PREFIX)}").exists():
            _remove_tree(old)


def _remove_tree(parent: Path) -> None:
    for directory in [*(child for child in parent.glob("s*") if child.is_dir()), parent]:
        with contextlib.suppress(OSError):
            directory.rmdir()
