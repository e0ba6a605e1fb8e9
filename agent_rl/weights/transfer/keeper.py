"""The trainer's side of channels that engines read no files from."""

import contextlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from torch._C._distributed_c10d import TCPStore

from agent_rl.weights.transfer.buckets import Bucket, head, plan
from agent_rl.weights.transfer.group import Group, Meeting, connect, open_meeting
from agent_rl.weights.transfer.memory import make_folder

BEGUN = "begun"
"""What the sender writes where an engine waits for it alone."""
CLOSE_S = 5.0
"""How long a run that ends waits for its trainer to free what it keeps; the next trainer on the machine does else."""


@dataclass(frozen=True)
class StoredBuckets:
    """A version in Ray's object store: the head of its weight file, and of each bucket what it is and its bytes."""

    head: bytes
    buckets: tuple[Bucket, ...]
    refs: tuple[Any, ...]


class Keeper:
    """Lives in the process of the trainer's first rank. Keeps versions as weight files in the memory of its machine,
    each written by all ranks, and gives them out in buckets: no process has more than one in its own memory.

    One group holds the sender and all engines. It is kept until somebody falls out of it, which shows in an error, or
    in that somebody asks for a group of its own.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._opened: TCPStore | None = None
        """What listens where all engines meet."""
        self._groups: dict[str, Group] = {}
        self._meeting: Meeting | None = None
        """Where all engines meet; None before they have, and after an error there."""
        self._somebody_left = False

    def folder(self) -> str:
        """Where the trainer is to write versions."""
        self._folder = self._folder or make_folder()
        return str(self._folder)

    def copy(self, source: str, target: str) -> None:
        shutil.copyfile(source, target)

    def remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def store(self, path: str, bucket_bytes: int) -> StoredBuckets:
        """Put a version into Ray's object store, where it stays for as long as somebody has the answer."""
        file = Path(path)
        buckets = plan(file, bucket_bytes)
        return StoredBuckets(head(file), buckets, tuple(ray.put(bucket.read(file).numpy()) for bucket in buckets))

    def plan(self, path: str, bucket_bytes: int) -> tuple[Bucket, ...]:
        return plan(Path(path), bucket_bytes)

    def meet_all(self, size: int, backend: str, timeout_s: float) -> Meeting:
        """Where to send a version to all engines: the group that there is, or a new one."""
        if self._meeting is not None and self._meeting.size == size and not self._somebody_left:
            return replace(self._meeting, is_new=False)
        if self._meeting is not None:
            self.leave(self._meeting.name)
        self._meeting, self._opened = open_meeting(ray.util.get_node_ip_address(), size, backend, timeout_s)
        self._somebody_left = False
        return self._meeting

    def backend(self) -> str:
        """What is fastest here."""
        return "nccl" if torch.cuda.is_available() else "gloo"

    def send(self, path: str, buckets: tuple[Bucket, ...], meeting: Meeting) -> None:
        """Broadcast a version to those who meet there: all engines, or one that has asked for it and waits.

        Raises `RuntimeError` if one does not come or is lost.
        """
        self._somebody_left = self._somebody_left or meeting.leaves_all
        try:
            if meeting.name not in self._groups:
                self._groups[meeting.name] = Group(meeting, 0, self._store(meeting))
            for bucket in buckets:
                data = bucket.read(Path(path))
                self._groups[meeting.name].broadcast(data.cuda() if meeting.backend == "nccl" else data)
        except BaseException:
            self.leave(meeting.name)  # those who are there hear of it at once
            raise

    def _store(self, meeting: Meeting) -> TCPStore:
        if self._meeting is not None and self._meeting.name == meeting.name and self._opened is not None:
            return self._opened
        store = connect(meeting)
        store.set(BEGUN, "1")
        return store

    def leave(self, name: str) -> None:
        """Part from a group; one that is unknown was left before."""
        if self._meeting is not None and self._meeting.name == name:
            self._meeting = None
        if group := self._groups.pop(name, None):
            with contextlib.suppress(RuntimeError):
                group.leave()
