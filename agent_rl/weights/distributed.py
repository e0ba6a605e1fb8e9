"""Weights by broadcasts in a process group of the trainer, its rank 0, and all engines."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ray
from pydantic import Field
from ray.exceptions import RayError

from agent_rl.registry import PartBase, PartConfig
from agent_rl.weights.transfer.engines import check_engine
from agent_rl.weights.transfer.handles import WeightBroadcast
from agent_rl.weights.transfer.kept import KeptByTrainer, answer


class Distributed(KeptByTrainer, PartBase):
    """The trainer keeps each version in the memory of its machine and broadcasts it, bucket by bucket, when it is due.

    An engine that was not there for it, since it or its server was started again, asks the trainer, which sends it the
    version in a group of their own; the next broadcast to all begins with a new group of all.
    """

    together = True

    class Config(PartConfig):
        type: Literal["distributed"] = "distributed"
        bucket_mb: float = Field(512.0, gt=0)
        """Mebibytes broadcast at a time, and held beside the model while they are; a larger tensor goes by itself."""
        backend: Literal["auto", "nccl", "gloo"] = "auto"
        """What carries them. `auto` is nccl where the trainer's machine has GPUs and the engine has its own, else gloo.
        An engine on the CPU needs gloo."""
        timeout_s: float = Field(120.0, gt=0)
        """How long ranks wait for each other, before those that are there ask the trainer one by one."""

        def check_run(self, run: Any) -> None:
            """The run's engines can be given weights this way."""
            engine = run.rollout.engine
            check_engine(self.type, engine)
            if engine.type == "embedded" and self.backend == "nccl":
                raise ValueError(
                    "the embedded engine is on the CPU, which weights.backend nccl does not reach; use gloo"
                )

    def __init__(self, config: Config, trainer: Any, num_workers: int, engine: Any) -> None:
        super().__init__(trainer)
        self._config = config
        self._backend = "gloo" if engine.type == "embedded" else config.backend
        self._num_workers, self._num_ranks = num_workers, int(getattr(engine, "tp_size", 1))
        self._sending: Any = None

    def publish(self, policy_version: int) -> list[Any]:
        return [self._trainer.publish.remote(self._path(policy_version))]

    def weights(self, policy_version: int) -> WeightBroadcast:
        path, config = self._path(policy_version), self._config
        buckets = answer(self._keeper("plan", path, int(config.bucket_mb * (1 << 20))))
        if self._backend == "auto":
            self._backend = answer(self._keeper("backend"))
        ranks = (self._num_workers, self._num_ranks)
        return WeightBroadcast(self._trainer, path, buckets, *ranks, self._backend, config.timeout_s)

    def for_all(self, policy_version: int) -> WeightBroadcast:
        """Begins the broadcast."""
        if self._sending is not None:
            with contextlib.suppress(RayError):  # whoever it did not reach has asked for it alone
                ray.get(self._sending)
        weights = self.weights(policy_version)
        size = 1 + self._num_workers * self._num_ranks
        meeting = answer(self._keeper("meet_all", size, self._backend, self._config.timeout_s))
        self._sending = self._keeper("send", weights.path, weights.buckets, meeting)
        return replace(weights, meeting=meeting)

    def save(self, policy_version: int, path: Path) -> list[Any]:
        return [self._keeper("copy", self._path(policy_version), str(path))]

    def restore(self, policy_version: int, path: Path) -> list[Any]:
        return [self._keeper("copy", str(path), self._path(policy_version))]

    def retire(self, policy_version: int) -> None:
        self._keeper("remove", self._path(policy_version))
