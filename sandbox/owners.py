"""Which server a container belongs to, so that those of a killed one are removed, and never another's.

`python -m sandbox.owners OWNER` waits until its standard input closes, that is until the server that started
it has ended, however it ended, and then removes what that server left.
"""

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from sandbox.base import Unsupported

LABEL = "agent-rl.sandbox.owner"


class Owner(NamedTuple):
    """A server process: the kernel's boot, the pid namespace, the pid, and when it started (in clock ticks)."""

    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def this_process(cls) -> "Owner":
        """This process as an owner. Raises `Unsupported` if the host is not Linux."""
        if not sys.platform.startswith("linux"):
            raise Unsupported(f"the docker backend needs a Linux host; here it is {sys.platform}")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
        return cls(boot, namespace, os.getpid(), _start_ticks(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> "Owner | None":
        """The owner that a label names; None if this version did not write the label."""
        fields = text.split("/")
        if len(fields) != 4 or not all(field.isdecimal() for field in fields[1:]):
            return None
        return cls(fields[0], fields[1], int(fields[2]), int(fields[3]))

    def __str__(self) -> str:
        return "/".join(map(str, self))

    def sees_dead(self, other: "Owner") -> bool:
        """Whether `other` was a server here and has ended; False for another machine's or container's."""
        here = (other.boot, other.namespace) == (self.boot, self.namespace)
        return here and _start_ticks(other.pid) != other.started

    def sweep_dead(self, client: Any) -> None:
        """Remove the containers of servers here that have ended."""
        for container in _labelled(client):
            other = Owner.parse(container["Labels"][LABEL])
            if other is not None and self.sees_dead(other):
                _remove(client, container["Id"])

    def sweep_own(self, client: Any) -> None:
        """Remove the containers of this very server."""
        for container in _labelled(client):
            if container["Labels"][LABEL] == str(self):
                _remove(client, container["Id"])


def _start_ticks(pid: int) -> int | None:
    """When a living process started, in clock ticks since boot; None if there is none."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(rest[18])


def _labelled(client: Any) -> list[Any]:
    return list(client.api.containers(all=True, filters={"label": LABEL}))


def _remove(client: Any, container_id: str) -> None:
    from docker.errors import DockerException

    with contextlib.suppress(DockerException):  # another server may sweep at the same time
        client.api.remove_container(container_id, force=True)


def main() -> None:
    owner = Owner.parse(sys.argv[1])
    assert owner is not None
    sys.stdin.read()
    from sandbox.docker import connect

    client = connect()
    for pause_s in (0, 2):  # again, for a container that the daemon was about to make
        time.sleep(pause_s)
        owner.sweep_own(client)


if __name__ == "__main__":
    main()
