"""Handles to weights that engines load in buckets: from Ray's object store, or from a broadcast."""

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
from agent_rl.weights.transfer.group import Group, GroupMembership, Rendezvous, open_rendezvous
from agent_rl.weights.transfer.version_store import BEGUN, StoredBuckets

_POLL_S = 0.02


def _shapes(buckets: tuple[Bucket, ...]) -> Shapes:
    return {name: shape for bucket in buckets for name, shape in zip(bucket.names, bucket.shapes, strict=True)}


@dataclass(frozen=True)
class WeightObjects:
    """Weights whose buckets are in Ray's object store. An engine can load them at any time."""

    stored: StoredBuckets

    def __str__(self) -> str:
        return "what the trainer published"

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.stored.buckets

    def shapes(self) -> Shapes:
        return _shapes(self.buckets)

    async def data(self) -> AsyncIterator[tuple[Bucket, Tensor]]:
        """Every bucket with its bytes, uint8 [size]. Raises `WeightsLostError` if the trainer, their owner, died."""
        for bucket, ref in zip(self.buckets, self.stored.refs, strict=True):
            try:
                found = await ref
            except RayError as error:
                raise WeightsLostError(f"weights are in Ray's object store no more: {error}") from None
            yield bucket, torch.from_numpy(found.copy())  # objects in the store are read-only

    async def tensors(self, membership: GroupMembership) -> AsyncIterator[dict[str, Tensor]]:
        async for bucket, data in self.data():
            yield bucket.tensors(data)

    def again(self) -> Self:
        return self


@dataclass(frozen=True)
class WeightBroadcast:
    """Weights that the trainer keeps and broadcasts, to all engines together or to one engine alone.

    `trainer`: its actor handle. `path`: the file of the weights on its machine. `num_workers`: engines in the group of
    all, of `num_ranks` ranks each; engines with a higher worker index are not in it. `timeout_s`: seconds that ranks
    wait for each other. `rendezvous`: the group of all engines; None if no broadcast to all is under way.
    """

    trainer: Any
    path: str
    buckets: tuple[Bucket, ...]
    num_workers: int
    num_ranks: int
    backend: str
    timeout_s: float
    rendezvous: Rendezvous | None = None

    def __str__(self) -> str:
        return "what the trainer published"

    def shapes(self) -> Shapes:
        return _shapes(self.buckets)

    def again(self) -> "WeightBroadcast":
        return replace(self, rendezvous=None)

    def is_for(self, group: str | None) -> bool:
        """Whether an engine takes part in the broadcast to all. `group`: the group that it is in, if any."""
        return self.rendezvous is not None and (self.rendezvous.is_new or self.rendezvous.name == group)

    async def ask(self, worker_index: int) -> "PrivateBroadcast":
        """Ask the trainer for a broadcast to one engine alone. Returns when it starts: a busy trainer is waited for.

        Raises `WeightsLostError` if the trainer cannot send the weights.
        """
        leaves_all, host = worker_index < self.num_workers, ray.util.get_node_ip_address()
        rendezvous, store = open_rendezvous(host, 1 + self.num_ranks, self.backend, self.timeout_s, leaves_all)
        sending = self.trainer.call_version_store.remote("broadcast", self.path, self.buckets, rendezvous)
        private = PrivateBroadcast(self.trainer, rendezvous, store, sending)
        while not store.check([BEGUN]):
            if ray.wait([sending], timeout=0)[0]:
                await private.end()
            await asyncio.sleep(_POLL_S)
        return private

    async def tensors(self, membership: GroupMembership) -> AsyncIterator[dict[str, Tensor]]:
        """The tensors of the broadcast to all. If this engine is not part of it, or it breaks: of a private one."""
        if self.rendezvous is not None and self.is_for(membership.group_name):
            try:
                async for tensors in self._received(await membership.join(self.rendezvous)):
                    yield tensors
            except RuntimeError:  # another rank has left the group
                membership.leave()
            else:
                return
        membership.leave()
        async for tensors in self._alone(membership.worker_index):
            yield tensors

    async def _alone(self, worker_index: int) -> AsyncIterator[dict[str, Tensor]]:
        private = await self.ask(worker_index)
        group: Group | None = None
        try:
            group = await asyncio.to_thread(Group, private.rendezvous, 1, private.store)
            async for tensors in self._received(group):
                yield tensors
        except RuntimeError as error:
            raise WeightsLostError(f"the trainer did not send the weights: {error}") from None
        finally:
            if group is not None:
                group.leave()
        await private.end()

    async def _received(self, group: Group) -> AsyncIterator[dict[str, Tensor]]:
        for bucket in self.buckets:
            data = torch.empty(bucket.size, dtype=torch.uint8)
            await asyncio.to_thread(group.broadcast, data)
            yield bucket.tensors(data)


@dataclass(frozen=True)
class PrivateBroadcast:
    """A broadcast to one engine, in a group of the trainer and that engine. Keep a reference to `store` until `end`.

    `sending`: the Ray reference of the trainer's call.
    """

    trainer: Any
    rendezvous: Rendezvous
    store: TCPStore
    sending: Any

    async def end(self) -> None:
        """Let the trainer leave the group, after the last bucket. Raises `WeightsLostError` if its broadcast failed."""
        try:
            await self.sending
        except RayError as error:
            raise WeightsLostError(f"the trainer did not send the weights: {error}") from None
        self.trainer.call_version_store.remote("leave", self.rendezvous.name)
