"""Weights by broadcasts in a process group: the trainer is rank 0, the engines are the other ranks."""

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
from agent_rl.weights.transfer.kept import KeptByTrainer, result_of


class Distributed(KeptByTrainer, PartBase):
    """Broadcasts each version from the trainer's memory to all engines, bucket by bucket.

    An engine that missed the broadcast, for example because it restarted, asks the trainer for a private broadcast, in
    a group of these two. The next broadcast to all engines then starts with a new group of all.
    """

    together = True

    class Config(PartConfig):
        type: Literal["distributed"] = "distributed"
        bucket_mb: float = Field(512.0, gt=0)
        """Mebibytes in one broadcast. Sender and receivers hold as much memory beside the model meanwhile. A tensor
        that is larger is broadcast alone."""
        backend: Literal["auto", "nccl", "gloo"] = "auto"
        """The backend of the process group. `auto` is gloo for the embedded engine, which is on the CPU, and for a
        trainer without a GPU; otherwise it is nccl. An SGLang server on the CPU needs gloo."""
        timeout_s: float = Field(120.0, gt=0)
        """Seconds that ranks wait for each other. After that, each engine that waited asks for a private broadcast."""

        def check_run(self, run: Any) -> None:
            """The run's engines can receive broadcasts."""
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
        self._broadcasting: Any = None

    def publish(self, step: int) -> list[Any]:
        return [self._trainer.publish.remote(self._path(step))]

    def weights(self, step: int) -> WeightBroadcast:
        path, config = self._path(step), self._config
        buckets = result_of(self._call_store("plan", path, int(config.bucket_mb * (1 << 20))))
        if self._backend == "auto":
            self._backend = result_of(self._call_store("backend"))
        ranks = (self._num_workers, self._num_ranks)
        return WeightBroadcast(self._trainer, path, buckets, *ranks, self._backend, config.timeout_s)

    def for_all(self, step: int) -> WeightBroadcast:
        """Start the broadcast to all engines. The one before it has ended by then."""
        if self._broadcasting is not None:
            with contextlib.suppress(RayError):  # an engine that it did not reach has asked for a private broadcast
                ray.get(self._broadcasting)
        weights = self.weights(step)
        size = 1 + self._num_workers * self._num_ranks
        rendezvous = result_of(self._call_store("rendezvous_of_all", size, self._backend, self._config.timeout_s))
        self._broadcasting = self._call_store("broadcast", weights.path, weights.buckets, rendezvous)
        return replace(weights, rendezvous=rendezvous)

    def save(self, step: int, path: Path) -> list[Any]:
        return [self._call_store("copy", self._path(step), str(path))]

    def restore(self, step: int, path: Path) -> list[Any]:
        return [self._call_store("copy", str(path), self._path(step))]

    def retire(self, step: int) -> None:
        self._call_store("remove", self._path(step))
