"""Weights as tensors that are handed over, bucket by bucket, through Ray's object store."""

import shutil
from pathlib import Path
from typing import Any, Literal

import ray
from pydantic import Field
from ray.exceptions import RayError

from agent_rl.registry import PartBase, PartConfig
from agent_rl.weights.base import WeightsLostError
from agent_rl.weights.transfer.engines import check_engine, check_same_machine
from agent_rl.weights.transfer.handles import WeightObjects
from agent_rl.weights.transfer.keeper import CLOSE_S, StoredBuckets


class Tensors(PartBase):
    """Each version lies in the object store of the trainer's machine; Ray brings buckets to where they are asked for.

    An engine of a SGLang server is given them as shared memory, by /update_weights_from_tensor.
    """

    together = False

    class Config(PartConfig):
        type: Literal["tensor"] = "tensor"
        bucket_mb: float = Field(512.0, gt=0)
        """Mebibytes handed over at a time, and held beside the model while they are; a larger tensor goes by itself."""

        def check_engine(self, engine: Any) -> None:
            """Raises `ValueError` if the engines of a run cannot be given weights this way."""
            check_engine(self.type, engine)
            check_same_machine(engine)

    def __init__(self, config: Config, trainer: Any, num_workers: int, engine: Any) -> None:
        self._trainer, self._bucket_bytes = trainer, int(config.bucket_mb * (1 << 20))
        self._stored: dict[int, Any] = {}
        self._folder = ""

    def publish(self, policy_version: int) -> list[Any]:
        """The trainer's ranks write a file in memory, the first one stores its buckets and removes it."""
        self._folder = self._folder or _answer(self._trainer.weights.remote("folder"))
        path = f"{self._folder}/{policy_version}.safetensors"
        writing = self._trainer.publish.remote(path)
        self._stored[policy_version] = self._trainer.weights.remote("store", path, self._bucket_bytes)
        return [writing, self._stored[policy_version], self._trainer.weights.remote("remove", path)]

    def weights(self, policy_version: int) -> WeightObjects:
        return WeightObjects(self._of(policy_version))

    for_all = weights

    def _of(self, policy_version: int) -> StoredBuckets:
        stored: StoredBuckets = _answer(self._stored[policy_version])
        return stored

    def save(self, policy_version: int, path: Path) -> list[Any]:
        stored = self._of(policy_version)
        with path.open("wb") as file:
            file.write(stored.head)
            for ref in stored.refs:
                file.write(_answer(ref).data)
        return []

    def restore(self, policy_version: int, path: Path) -> list[Any]:
        self._stored[policy_version] = self._trainer.weights.remote("store", str(path), self._bucket_bytes)
        return [self._stored[policy_version]]

    def retire(self, policy_version: int) -> None:
        self._stored.pop(policy_version, None)

    def close(self) -> None:
        """Free the memory, as `Distributed.close` does."""
        self._stored.clear()
        ray.wait([self._trainer.weights.remote("close")], timeout=CLOSE_S)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _answer(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        raise WeightsLostError(f"the trainer gives no weights: {error}") from None
