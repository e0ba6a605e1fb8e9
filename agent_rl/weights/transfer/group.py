"""Process groups between one sender and engines, beside whatever groups these processes have of their own."""

import asyncio
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world


@dataclass(frozen=True)
class Meeting:
    """Where `size` ranks meet, of which the sender is rank 0.

    `is_new`: the group is still to be joined. `leaves_all`: an engine of the group of all meets the sender here, since
    it is in that group no more.
    """

    name: str
    host: str
    port: int
    size: int
    backend: str
    timeout_s: float
    is_new: bool = True
    leaves_all: bool = False


class Group:
    """This process as one rank of a group. It is made, and waited for, as SGLang makes its own side.

    Raises `RuntimeError` if the others do not come in time.
    """

    def __init__(self, meeting: Meeting, rank: int, store: TCPStore | None = None) -> None:
        timeout = timedelta(seconds=meeting.timeout_s)
        self.name = meeting.name
        self._store = store or connect(meeting)
        self._group: Any
        self._group, _ = _new_process_group_helper(
            meeting.size,
            rank,
            [],
            Backend(meeting.backend),
            PrefixStore(meeting.name, self._store),
            group_name=meeting.name,  # type: ignore[arg-type]
            timeout=timeout,
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(meeting.size)}

    def broadcast(self, data: Tensor) -> None:
        """From rank 0 to all others, in place. Raises `RuntimeError` if one is gone."""
        self._group.broadcast(data, 0).wait()

    def leave(self) -> None:
        dist.destroy_process_group(self._group)


class Seat:
    """The place of an engine, here of one rank, in the group of all engines, which it stays in between updates."""

    def __init__(self, worker_index: int) -> None:
        self.worker_index = worker_index
        self._group: Group | None = None

    @property
    def group_name(self) -> str | None:
        return None if self._group is None else self._group.name

    async def take(self, meeting: Meeting) -> Group:
        """Be in the group that meets there. Raises `RuntimeError` if the others do not come in time."""
        if self._group is None or self._group.name != meeting.name:
            self.leave()
            self._group = await asyncio.to_thread(Group, meeting, 1 + self.worker_index)
        return self._group

    def leave(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None


def connect(meeting: Meeting) -> TCPStore:
    """What those who meet there agree by."""
    return TCPStore(meeting.host, meeting.port, timeout=timedelta(seconds=meeting.timeout_s), wait_for_workers=False)


def open_meeting(
    host: str, size: int, backend: str, timeout_s: float, leaves_all: bool = False
) -> tuple[Meeting, TCPStore]:
    """A place to meet at this machine, and what listens there for as long as it is held."""
    store = TCPStore(
        host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, use_libuv=True
    )
    name = f"weights-{secrets.token_hex(6)}"
    return Meeting(name, host, store.port, size, backend, timeout_s, leaves_all=leaves_all), store
