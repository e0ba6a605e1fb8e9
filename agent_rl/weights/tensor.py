"""Weights through Ray's object store, bucket by bucket."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from agent_rl.registry import PartBase, PartConfig
from agent_rl.weights.transfer.engines import check_engine, check_same_machine
from agent_rl.weights.transfer.handles import WeightObjects
from agent_rl.weights.transfer.kept import KeptByTrainer, result_of
from agent_rl.weights.transfer.version_store import StoredBuckets


class Tensors(KeptByTrainer, PartBase):
    """Puts the buckets of each version into Ray's object store, from which each rollout worker fetches them.

    An SGLang server receives them from its worker through shared memory, by /update_weights_from_tensor.
    """

    together = False

    class Config(PartConfig):
        type: Literal["tensor"] = "tensor"
        bucket_mb: float = Field(512.0, gt=0)
        """Mebibytes in one object. Trainer and workers hold as much memory beside the model while they move it. A
        tensor that is larger is an object of its own."""

        def check_run(self, run: Any) -> None:
            """The run's engines can load weights in buckets, and are on this machine."""
            engine = run.rollout.engine
            check_engine(self.type, engine)
            check_same_machine(engine)

    def __init__(self, config: Config, trainer: Any, num_workers: int, engine: Any) -> None:
        super().__init__(trainer)
        self._bucket_bytes = int(config.bucket_mb * (1 << 20))
        self._stored: dict[int, Any] = {}

    def publish(self, step: int) -> list[Any]:
        """All ranks of the trainer write a file in memory; rank 0 puts its buckets into the object store and removes
        the file."""
        path = self._path(step)
        writing = self._trainer.publish.remote(path)
        self._stored[step] = self._call_store("put_objects", path, self._bucket_bytes)
        return [writing, self._stored[step], self._call_store("remove", path)]

    def weights(self, step: int) -> WeightObjects:
        return WeightObjects(self._of(step))

    for_all = weights

    def _of(self, step: int) -> StoredBuckets:
        stored: StoredBuckets = result_of(self._stored[step])
        return stored

    def save(self, step: int, path: Path) -> list[Any]:
        stored = self._of(step)
        with path.open("wb") as file:
            file.write(stored.head)
            for ref in stored.refs:
                file.write(result_of(ref).data)
        return []

    def restore(self, step: int, path: Path) -> list[Any]:
        self._stored[step] = self._call_store("put_objects", str(path), self._bucket_bytes)
        return [self._stored[step]]

    def retire(self, step: int) -> None:
        self._stored.pop(step, None)

    def close(self) -> None:
        self._stored.clear()
        super().close()
