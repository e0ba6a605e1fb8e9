"""Weights through a folder that trainer and engines both see, such as one of a shared filesystem."""

from pathlib import Path
from typing import Any, Literal

from agent_rl.registry import PartBase, PartConfig
from agent_rl.weights.base import FileChannel
from agent_rl.weights.transfer.memory import make_folder


class Disk(FileChannel, PartBase):
    """A folder of this run's own in `directory`, removed when the run ends; if it was killed, when the next begins."""

    class Config(PartConfig):
        type: Literal["disk"] = "disk"
        directory: Path
        """Where the folder is made; an absolute path that means the same on every machine of the run."""

    def __init__(self, config: Config, trainer: Any, num_workers: int, engine: Any) -> None:
        if not config.directory.is_dir():
            raise ValueError(f"weights.directory {str(config.directory)!r} is no directory; make it first")
        super().__init__(make_folder(config.directory.absolute()), trainer)
