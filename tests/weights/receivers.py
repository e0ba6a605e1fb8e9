"""A trainer and engines that are nothing but the two ends of a weight channel: real actors, groups and objects."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
import torch
from safetensors.torch import save_file
from torch import Tensor

from agent_rl import registry
from agent_rl.registry import PartKind
from agent_rl.weights.base import Weights
from agent_rl.weights.transfer import handles
from agent_rl.weights.transfer.group import Group, GroupMembership
from agent_rl.weights.transfer.version_store import VersionStore


def file_of(version: int) -> dict[str, Tensor]:
    """Weights of a version; one tensor is larger than the smallest bucket."""
    torch.manual_seed(version)
    return {
        "a": torch.randn(300, 7),
        "b": torch.randn(5),
        "big": torch.randn(900, 1000),
        "half": torch.randn(11, 3).bfloat16(),
    }


class Source:
    """What a channel asks of a trainer."""

    def __init__(self) -> None:
        self.version_store, self.version = VersionStore(), 0

    def become(self, version: int) -> None:
        self.version = version

    def publish(self, path: str) -> None:
        save_file(file_of(self.version), path)

    def call_version_store(self, method: str, *arguments: Any) -> Any:
        return getattr(self.version_store, method)(*arguments)

    def work(self, until: Path) -> None:
        """Be busy, as a trainer is that trains, until that file is there."""
        while not until.exists():
            time.sleep(0.02)

    def process_id(self) -> int:
        return os.getpid()


class Receiver:
    """What receives weights in an engine."""

    def __init__(self, index: int) -> None:
        self.membership = GroupMembership(index)

    async def sum(self, weights: Weights) -> float:
        """The sum of all tensors, as the last time they were sent whole."""
        found: dict[str, Tensor] = {}
        async for tensors in weights.tensors(self.membership):
            found |= {name: tensor.double().sum() for name, tensor in tensors.items()}
        return float(sum(found[name] for name in sorted(weights.shapes())))

    async def joined_after(self, weights: Weights, event: Path) -> tuple[float, list[bool]]:
        """`sum`; and of each group that was joined for it alone, whether the file `event` was there by then."""
        found: list[bool] = []

        class Joined(Group):
            def __init__(self, *arguments: Any) -> None:
                found.append(event.exists())
                super().__init__(*arguments)

        with mock.patch.object(handles, "Group", Joined):
            return await self.sum(weights), found

    async def group(self) -> str | None:
        return self.membership.group_name


def channel_of(kind: str, trainer: Any, num_workers: int, directory: Path, timeout_s: float = 300.0) -> Any:
    own: dict[str, Any] = {"disk": {"directory": str(directory)}, "shared_memory": {}}.get(kind, {"bucket_mb": 0.1})
    own |= {"timeout_s": timeout_s} if kind == "distributed" else {}
    config = PartKind("weights").parse({"type": kind, **own})
    engine = SimpleNamespace(type="embedded")
    return registry.build("weights", config, trainer=trainer, num_workers=num_workers, engine=engine)


def answers_of(engines: list[Any], weights: Weights) -> list[float]:
    found: list[float] = ray.get([engine.sum.remote(weights) for engine in engines])
    return found


def folders_of(process_id: int) -> list[Path]:
    return [folder for root in ("/dev/shm", "/tmp") for folder in Path(root).glob(f"agent-rl-weights-*-{process_id}-*")]
