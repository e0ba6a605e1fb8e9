"""Process groups of one sender and its engines, apart from the other process groups that these processes are in."""

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
class Rendezvous:
    """Where and how `size` ranks form a process group. The sender is rank 0.

    `name`: of the group. `host`, `port`: of the rendezvous store. `backend`: nccl or gloo. `timeout_s`: seconds that
    ranks wait for each other. `is_new`: the ranks have not joined the group yet. `leaves_all`: the group is for one
    engine that is no longer in the group of all engines, so that the sender has to form a new one.
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
    """A process group with this process as rank `rank`. The constructor waits until all ranks have joined.

    The group is made the same way as SGLang makes it on its side. Raises `RuntimeError` if a rank does not join in
    time.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, store: TCPStore | None = None) -> None:
        timeout = timedelta(seconds=rendezvous.timeout_s)
        self.name = rendezvous.name
        self._store = store or connect(rendezvous)
        self._group: Any
        self._group, _ = _new_process_group_helper(
            rendezvous.size,
            rank,
            [],
            Backend(rendezvous.backend),
            PrefixStore(rendezvous.name, self._store),
            group_name=rendezvous.name,  # type: ignore[arg-type]
            timeout=timeout,
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(rendezvous.size)}

    def broadcast(self, data: Tensor) -> None:
        """Copy `data` of rank 0 into `data` of all others. Raises `RuntimeError` if a rank has left."""
        self._group.broadcast(data, 0).wait()

    def leave(self) -> None:
        """Destroy the group in this process. Broadcasts of the other ranks fail from then on."""
        dist.destroy_process_group(self._group)


class GroupMembership:
    """The membership of an engine, which is one rank here, in the group of all engines. It lasts between updates."""

    def __init__(self, worker_index: int) -> None:
        self.worker_index = worker_index
        self._group: Group | None = None

    @property
    def group_name(self) -> str | None:
        """The name of the group that the engine is in; None if it is in none."""
        return None if self._group is None else self._group.name

    async def join(self, rendezvous: Rendezvous) -> Group:
        """Join the group of `rendezvous`, unless it is joined already. Raises `RuntimeError` if a rank is late."""
        if self._group is None or self._group.name != rendezvous.name:
            self.leave()
            self._group = await asyncio.to_thread(Group, rendezvous, 1 + self.worker_index)
        return self._group

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self._group is not None:
            self._group.leave()
            self._group = None


def connect(rendezvous: Rendezvous) -> TCPStore:
    """Connect to the rendezvous store."""
    return TCPStore(
        rendezvous.host, rendezvous.port, timeout=timedelta(seconds=rendezvous.timeout_s), wait_for_workers=False
    )


def open_rendezvous(
    host: str, size: int, backend: str, timeout_s: float, leaves_all: bool = False
) -> tuple[Rendezvous, TCPStore]:
    """Start a rendezvous store on `host`, this machine. It listens for as long as the returned store is referenced."""
    store = TCPStore(
        host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, use_libuv=True
    )
    name = f"weights-{secrets.token_hex(6)}"
    return Rendezvous(name, host, store.port, size, backend, timeout_s, leaves_all=leaves_all), store
