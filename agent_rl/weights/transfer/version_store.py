"""The trainer's side of the channels that move weights in buckets."""

import contextlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from torch._C._distributed_c10d import TCPStore

from agent_rl.weights.transfer.buckets import Bucket, head, plan
from agent_rl.weights.transfer.group import Group, Rendezvous, connect, open_rendezvous
from agent_rl.weights.transfer.memory import make_folder

BEGUN = "begun"
"""Key set when a one-engine broadcast starts."""
CLOSE_S = 5.0
"""Seconds that a run waits at its end for the trainer to delete its versions; the next trainer on the machine removes
them otherwise."""


@dataclass(frozen=True)
class StoredBuckets:
    """Weights in Ray's object store. `head`: the header of their safetensors file. `refs`: the bytes of each bucket."""

    head: bytes
    buckets: tuple[Bucket, ...]
    refs: tuple[Any, ...]


class VersionStore:
    """Keeps the published weights and sends them, in the process of the trainer's rank 0.

    All ranks write each version to one file in the shared memory of the machine. This class sends such a file bucket
    by bucket, so that no process holds more than one bucket in its own memory.

    The group of the sender and all engines is used again for each broadcast. A new one replaces it after an error, or
    after one of its engines has asked for a private broadcast.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._store: TCPStore | None = None
        """The rendezvous store of the group of all engines."""
        self._groups: dict[str, Group] = {}
        self._rendezvous: Rendezvous | None = None
        """The group of all engines; None before the first broadcast and after an error in it."""
        self._engine_left = False

    def folder(self) -> str:
        """The folder for the files of the versions, created on the first call."""
        self._folder = self._folder or make_folder()
        return str(self._folder)

    def copy(self, source: str, target: str) -> None:
        """Copy a file on the trainer's machine."""
        shutil.copyfile(source, target)

    def remove(self, path: str) -> None:
        """Delete a file on the trainer's machine; one that does not exist is ignored."""
        Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Delete all versions."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def put_objects(self, path: str, bucket_bytes: int) -> StoredBuckets:
        """Put a weight file into Ray's object store. It stays there for as long as the result is referenced."""
        file = Path(path)
        buckets = plan(file, bucket_bytes)
        return StoredBuckets(head(file), buckets, tuple(ray.put(bucket.read(file).numpy()) for bucket in buckets))

    def plan(self, path: str, bucket_bytes: int) -> tuple[Bucket, ...]:
        """See `buckets.plan`."""
        return plan(Path(path), bucket_bytes)

    def rendezvous_of_all(self, size: int, backend: str, timeout_s: float) -> Rendezvous:
        """The rendezvous of the group of all engines: the one in use if all are still in it, otherwise a new one."""
        if self._rendezvous is not None and self._rendezvous.size == size and not self._engine_left:
            return replace(self._rendezvous, is_new=False)
        if self._rendezvous is not None:
            self.leave(self._rendezvous.name)
        self._rendezvous, self._store = open_rendezvous(ray.util.get_node_ip_address(), size, backend, timeout_s)
        self._engine_left = False
        return self._rendezvous

    def backend(self) -> str:
        """The fastest backend on this machine."""
        return "nccl" if torch.cuda.is_available() else "gloo"

    def broadcast(self, path: str, buckets: tuple[Bucket, ...], rendezvous: Rendezvous) -> None:
        """Broadcast the weight file `path` to the engines of `rendezvous`: all of them, or one that has asked for it.

        Raises `RuntimeError` if an engine does not join in time or is lost.
        """
        self._engine_left = self._engine_left or rendezvous.leaves_all
        try:
            if rendezvous.name not in self._groups:
                self._groups[rendezvous.name] = Group(rendezvous, 0, self._rendezvous_store(rendezvous))
            for bucket in buckets:
                data = bucket.read(Path(path))
                self._groups[rendezvous.name].broadcast(data.cuda() if rendezvous.backend == "nccl" else data)
        except BaseException:
            self.leave(rendezvous.name)  # so that the engines that have joined fail at once
            raise

    def _rendezvous_store(self, rendezvous: Rendezvous) -> TCPStore:
        if self._rendezvous is not None and self._rendezvous.name == rendezvous.name and self._store is not None:
            return self._store
        store = connect(rendezvous)
        store.set(BEGUN, "1")
        return store

    def leave(self, name: str) -> None:
        """Leave the group of that name; an unknown one has been left before."""
        if self._rendezvous is not None and self._rendezvous.name == name:
            self._rendezvous = None
        if group := self._groups.pop(name, None):
            with contextlib.suppress(RuntimeError):
                group.leave()
