"""Versions that engines get in buckets: from Ray's object store, or by a broadcast."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Self

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from agent_rl.weights.base import Shapes, WeightsLostError
from agent_rl.weights.transfer.buckets import Bucket
from agent_rl.weights.transfer.group import Group, Meeting, Seat, open_meeting
from agent_rl.weights.transfer.keeper import BEGUN, StoredBuckets

_POLL_S = 0.02


def _shapes(buckets: tuple[Bucket, ...]) -> Shapes:
    return {name: shape for bucket in buckets for name, shape in zip(bucket.names, bucket.shapes, strict=True)}


@dataclass(frozen=True)
class WeightObjects:
    """A version whose buckets are objects in Ray's store, to be had at any time."""

    stored: StoredBuckets

    def __str__(self) -> str:
        return "what the trainer published"

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.stored.buckets

    def shapes(self) -> Shapes:
        return _shapes(self.buckets)

    async def data(self) -> AsyncIterator[tuple[Bucket, Tensor]]:
        """Every bucket with its bytes. Raises `WeightsLostError` if the trainer, who owns them, is gone."""
        for bucket, ref in zip(self.buckets, self.stored.refs, strict=True):
            try:
                found = await ref
            except RayError as error:
                raise WeightsLostError(f"weights are in Ray's object store no more: {error}") from None
            yield bucket, torch.from_numpy(found.copy())  # what is in the store cannot be written to

    async def tensors(self, seat: Seat) -> AsyncIterator[dict[str, Tensor]]:
        async for bucket, data in self.data():
            yield bucket.tensors(data)

    def again(self) -> Self:
        return self


@dataclass(frozen=True)
class WeightBroadcast:
    """A version that the trainer keeps and broadcasts: to all engines at `meeting`, where that is being done now, and
    to any engine alone that asks for it.

    `trainer` is its actor handle, `path` the version's file on its machine. All engines are `num_workers`, of
    `num_ranks` ranks each; there may be others, with a higher worker index.
    """

    trainer: Any
    path: str
    buckets: tuple[Bucket, ...]
    num_workers: int
    num_ranks: int
    backend: str
    timeout_s: float
    meeting: Meeting | None = None

    def __str__(self) -> str:
        return "what the trainer published"

    def shapes(self) -> Shapes:
        return _shapes(self.buckets)

    def again(self) -> "WeightBroadcast":
        return replace(self, meeting=None)

    def is_for(self, group: str | None) -> bool:
        """Whether an engine that is in the group of that name, or in none, receives what is sent to all."""
        return self.meeting is not None and (self.meeting.is_new or self.meeting.name == group)

    async def ask(self, worker_index: int) -> "Asked":
        """Ask the trainer to send this to one engine alone. Returns once it begins, however long it is busy before.

        Raises `WeightsLostError` if it cannot.
        """
        leaves_all, host = worker_index < self.num_workers, ray.util.get_node_ip_address()
        meeting, store = open_meeting(host, 1 + self.num_ranks, self.backend, self.timeout_s, leaves_all)
        sending = self.trainer.weights.remote("send", self.path, self.buckets, meeting)
        asked = Asked(self.trainer, meeting, store, sending)
        while not store.check([BEGUN]):
            if ray.wait([sending], timeout=0)[0]:
                await asked.end()
            await asyncio.sleep(_POLL_S)
        return asked

    async def tensors(self, seat: Seat) -> AsyncIterator[dict[str, Tensor]]:
        """What is sent to all; from the beginning and alone, where this engine has no part in that or it breaks."""
        if self.meeting is not None and self.is_for(seat.group_name):
            try:
                async for tensors in self._received(await seat.take(self.meeting)):
                    yield tensors
            except RuntimeError:  # of a group that another rank has left
                seat.leave()
            else:
                return
        seat.leave()
        async for tensors in self._alone(seat.worker_index):
            yield tensors

    async def _alone(self, worker_index: int) -> AsyncIterator[dict[str, Tensor]]:
        asked = await self.ask(worker_index)
        group: Group | None = None
        try:
            group = await asyncio.to_thread(Group, asked.meeting, 1, asked.store)
            async for tensors in self._received(group):
                yield tensors
        except RuntimeError as error:
            raise WeightsLostError(f"the trainer did not send the weights: {error}") from None
        finally:
            if group is not None:
                group.leave()
        await asked.end()

    async def _received(self, group: Group) -> AsyncIterator[dict[str, Tensor]]:
        for bucket in self.buckets:
            data = torch.empty(bucket.size, dtype=torch.uint8)
            await asyncio.to_thread(group.broadcast, data)
            yield bucket.tensors(data)


@dataclass(frozen=True)
class Asked:
    """A version that is being sent to one engine, which meets the trainer alone. Hold `store` until the end."""

    trainer: Any
    meeting: Meeting
    store: TCPStore
    sending: Any

    async def end(self) -> None:
        """All has been received: the trainer may part from the group. Raises `WeightsLostError` if it had failed."""
        try:
            await self.sending
        except RayError as error:
            raise WeightsLostError(f"the trainer did not send the weights: {error}") from None
        self.trainer.weights.remote("leave", self.meeting.name)
