"""What the Ray training actor is."""

from pathlib import Path

from agent_rl import registry
from agent_rl.config import RunConfig, model_directory
from agent_rl.records import Trajectory
from agent_rl.trainer.base import TrainEngine, TrainResult


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
        self.engine.save(Path(directory))

    def load(self, directory: str) -> None:
        self.engine.load(Path(directory))
