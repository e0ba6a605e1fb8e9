"""The Ray actor that trains: one process of the trainer."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl import registry
from agent_rl.config import RunConfig
from agent_rl.records import Trajectory
from agent_rl.stacks import dump_on_signal
from agent_rl.trainer.base import TrainEngine, TrainResult
from agent_rl.weights.transfer.version_store import VersionStore

_FULL_BYTES = 32 << 20


@dataclass(frozen=True)
class RankAddress:
    """The rank of one process of a trainer, and the address at which the ranks form their process group."""

    rank: int
    num_ranks: int
    host: str
    port: int

    def set_environment(self) -> None:
        """Set the variables that torchrun sets, from which the engine makes its process group."""
        os.environ |= {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


class TrainWorker:
    """A Ray actor around a `TrainEngine`, built from a run's config. See `TrainEngine` for what is not documented here.

    Paths are strings in its calls. `address`: the rank in a trainer of several processes; None if it is the only one.
    """

    def __init__(self, config: RunConfig, address: RankAddress | None = None) -> None:
        if address is not None:
            address.set_environment()
        self.engine: TrainEngine = registry.build(
            "trainer",
            config.trainer,
            model_path=str(config.model.directory),
            objective=config.objective,
        )
        self.version_store = VersionStore()

    def train(self, trajectories: list[Trajectory], policy_version: int) -> TrainResult:
        return self.engine.train(trajectories, policy_version)

    def publish(self, path: str) -> None:
        self.engine.publish(Path(path))

    def call_version_store(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `VersionStore`, through which weight channels keep and send published weights."""
        return getattr(self.version_store, method)(*arguments)

    def begin_save(self, directory: str) -> None:
        """Start a checkpoint. Raises `OSError` where the disk is full."""
        with _full_disk_named(Path(directory)):
            self.engine.begin_save(Path(directory))

    def finish_save(self, directory: str) -> None:
        """Wait for the checkpoint that was begun. Raises `OSError` where the disk is full."""
        with _full_disk_named(Path(directory)):
            self.engine.finish_save()

    def load(self, directory: str) -> None:
        self.engine.load(Path(directory))

    def ping(self) -> bool:
        """Returns True once all earlier calls are done, since the actor runs its calls in order."""
        return True

    def dump_stacks_to(self, path: str) -> tuple[str, int]:
        """Write stacks to `path` on a signal; see `agent_rl.stacks`. Returns host name and process id."""
        return dump_on_signal(path)


@contextmanager
def _full_disk_named(directory: Path) -> Iterator[None]:
    """Raise `OSError` if the disk is full: the error of torch does not say so."""
    try:
        yield
    except Exception as error:
        if shutil.disk_usage(directory.parent).free > _FULL_BYTES:
            raise
        message = f"the disk of {directory} is full, so the checkpoint was not written; free some space"
        raise OSError(message) from error
