"""What the Ray training actor is."""

import json
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
            dtype=config.model.dtype,
            objective=config.objective,
        )

    def train(self, trajectories: list[Trajectory], policy_version: int) -> TrainResult:
        return self.engine.train(trajectories, policy_version)

    def publish(self, path: str) -> None:
        self.engine.publish(Path(path))

    def save(self, directory: str, step: int, ramp_from: int) -> None:
        """Write a checkpoint of `step`; state.json goes last, so its presence says the rest is whole."""
        self.engine.save(Path(directory))
        (Path(directory) / "state.json").write_text(json.dumps({"step": step, "ramp_from": ramp_from}))

    def load(self, directory: str) -> None:
        self.engine.load(Path(directory))
