"""The interface of trainers, and the result of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agent_rl.records import FloatArray, Trajectory
from agent_rl.registry import PartConfig


class TrainerConfig(PartConfig):
    """What a trainer's `Config` derives from."""

    @property
    def num_ranks(self) -> int:
        """Processes that the trainer has."""
        return 1

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps, each a policy version, that are made of one rollout batch."""
        return 1


@dataclass
class TrainResult:
    """The updates on one rollout batch. Per-trajectory lists are in the order the trajectories were given.

    `logprobs`, `entropy`, `ref_logprobs`: float32 [L] each, NaN on tokens the policy did not sample; taken
    at the weights before the first update that used the trajectory. `proximal_logprobs`: at the weights each token was
    sampled with, where they were computed. `trained_at`: the policy versions at which each trajectory was used.
    `mismatch`: rows of every update, by its number `update`. `metrics`: scalars, means over the updates.
    """

    advantages: FloatArray
    logprobs: list[FloatArray]
    entropy: list[FloatArray]
    ref_logprobs: list[FloatArray] | None = None
    proximal_logprobs: list[FloatArray | None] | None = None
    trained_at: list[list[int]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    mismatch: list[dict[str, Any]] = field(default_factory=list)


class TrainEngine(Protocol):
    """Owns the weights and the optimizer. Built as `cls(config, model_path, objective)`."""

    def train(self, trajectories: Sequence[Trajectory], policy_version: int) -> TrainResult:
        """Train on whole groups, from `policy_version` on; each optimizer step is a version further.

        Raises `ValueError` naming a trajectory that cannot be used.
        """
        ...

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        """Log-prob of every sampled token under the current weights, replayed as it was sampled."""
        ...

    def publish(self, path: Path) -> None:
        """Write the current weights as safetensors under Hugging Face names."""
        ...

    def begin_save(self, directory: Path) -> None:
        """Start to write a Hugging Face model directory, with the optimizer's state beside it; training can go on."""
        ...

    def finish_save(self) -> None:
        """Wait until what `begin_save` began is written. Raises what went wrong."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what was saved."""
        ...
