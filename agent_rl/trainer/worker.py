"""What the Ray training actor is."""

import shutil
from pathlib import Path

from agent_rl import registry
from agent_rl.config import RunConfig, model_directory
from agent_rl.records import Trajectory
from agent_rl.stacks import dump_on_signal
from agent_rl.trainer.base import TrainEngine, TrainResult

_FULL_BYTES = 32 << 20


class TrainWorker:
    """A `TrainEngine` built from a run's config, with paths and checkpoints as an actor's messages carry them."""

    def __init__(self, config: RunConfig) -> None:
        self.engine: TrainEngine = registry.build(
            "trainer",
            config.trainer,
            model_path=str(model_directory(config.model.path)),
            objective=config.objective,
        )

    def train(self, trajectories: list[Trajectory], policy_version: int) -> TrainResult:
        return self.engine.train(trajectories, policy_version)

    def publish(self, path: str) -> None:
        self.engine.publish(Path(path))

    def save(self, directory: str) -> None:
        """Raises `OSError` where the disk is full: what torch says of that does not name it."""
        try:
            self.engine.save(Path(directory))
        except Exception as error:
            if shutil.disk_usage(Path(directory).parent).free > _FULL_BYTES:
                raise
            message = f"the disk of {directory} is full, so the checkpoint was not written; free some space"
            raise OSError(message) from error

    def load(self, directory: str) -> None:
        self.engine.load(Path(directory))

    def is_idle(self) -> bool:
        """True, once what the trainer was asked for before is done."""
        return True

    def dump_stacks_to(self, path: str) -> tuple[str, int]:
        """See `agent_rl.stacks`."""
        return dump_on_signal(path)
