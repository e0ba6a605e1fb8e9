"""The Ray training actor."""

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
from agent_rl.weights.transfer.keeper import Keeper

_FULL_BYTES = 32 << 20


@dataclass(frozen=True)
class RankAddress:
    """The rank of one of a trainer's processes, and where all of them meet."""

    rank: int
    num_ranks: int
    host: str
    port: int

    def set_environment(self) -> None:
        """Set the variables that torchrun sets, so that the engine finds its process group by them."""
        os.environ |= {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


class TrainWorker:
    """A `TrainEngine` built from a run's config, with paths and checkpoints as an actor's messages carry them.

    `address`: which rank of a trainer of several processes it is; None for one that is alone.
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
        self.keeper = Keeper()

    def train(self, trajectories: list[Trajectory], policy_version: int) -> TrainResult:
        return self.engine.train(trajectories, policy_version)

    def publish(self, path: str) -> None:
        self.engine.publish(Path(path))

    def weights(self, method: str, *arguments: Any) -> Any:
        """Call `method` of the `Keeper`, which keeps and sends what weight channels publish."""
        return getattr(self.keeper, method)(*arguments)

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

    def is_idle(self) -> bool:
        """Return True once all earlier calls are done."""
        return True

    def dump_stacks_to(self, path: str) -> tuple[str, int]:
        """Let a signal dump this process's stacks; see `agent_rl.stacks`."""
        return dump_on_signal(path)


@contextmanager
def _full_disk_named(directory: Path) -> Iterator[None]:
    """Raise `OSError` if the disk is full, since torch's own error does not say so."""
    try:
        yield
    except Exception as error:
        if shutil.disk_usage(directory.parent).free > _FULL_BYTES:
            raise
        message = f"the disk of {directory} is full, so the checkpoint was not written; free some space"
        raise OSError(message) from error
