"""Weights as tensors that are handed over, bucket by bucket, through Ray's object store."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from agent_rl.registry import PartBase, PartConfig
from agent_rl.weights.transfer.engines import check_engine, check_same_machine
from agent_rl.weights.transfer.handles import WeightObjects
from agent_rl.weights.transfer.keeper import StoredBuckets
from agent_rl.weights.transfer.kept import KeptByTrainer, answer


class Tensors(KeptByTrainer, PartBase):
    """Each version lies in the object store of the trainer's machine; Ray brings buckets to where they are asked for.

    An engine of a SGLang server is given them as shared memory, by /update_weights_from_tensor.
    """

    together = False

    class Config(PartConfig):
        type: Literal["tensor"] = "tensor"
        bucket_mb: float = Field(512.0, gt=0)
        """Mebibytes handed over at a time, and held beside the model while they are; a larger tensor goes by itself."""

        def check_run(self, run: Any) -> None:
            """The run's engines can be given weights this way."""
            engine = run.rollout.engine
            check_engine(self.type, engine)
            check_same_machine(engine)

    def __init__(self, config: Config, trainer: Any, num_workers: int, engine: Any) -> None:
        super().__init__(trainer)
        self._bucket_bytes = int(config.bucket_mb * (1 << 20))
        self._stored: dict[int, Any] = {}

    def publish(self, policy_version: int) -> list[Any]:
        """The trainer's ranks write a file in memory, the first one stores its buckets and removes it."""
        path = self._path(policy_version)
        writing = self._trainer.publish.remote(path)
        self._stored[policy_version] = self._keeper("store", path, self._bucket_bytes)
        return [writing, self._stored[policy_version], self._keeper("remove", path)]

    def weights(self, policy_version: int) -> WeightObjects:
        return WeightObjects(self._of(policy_version))

    for_all = weights

    def _of(self, policy_version: int) -> StoredBuckets:
        stored: StoredBuckets = answer(self._stored[policy_version])
        return stored

    def save(self, policy_version: int, path: Path) -> list[Any]:
        stored = self._of(policy_version)
        with path.open("wb") as file:
            file.write(stored.head)
            for ref in stored.refs:
                file.write(answer(ref).data)
        return []

    def restore(self, policy_version: int, path: Path) -> list[Any]:
        self._stored[policy_version] = self._keeper("store", str(path), self._bucket_bytes)
        return [self._stored[policy_version]]

    def retire(self, policy_version: int) -> None:
        self._stored.pop(policy_version, None)

    def close(self) -> None:
        self._stored.clear()
        super().close()
