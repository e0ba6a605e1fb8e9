"""Weights through a folder on a disk that trainer and engines share, such as a network filesystem."""

from pathlib import Path
from typing import Any, Literal

from agent_rl.registry import PartBase, PartConfig
from agent_rl.weights.base import FileChannel
from agent_rl.weights.transfer.memory import make_folder


class Disk(FileChannel, PartBase):
    """Writes each version to a file in a new folder below `directory`.

    The folder is removed when the run ends, or by the next run on the machine if this one is killed.
    """

    class Config(PartConfig):
        type: Literal["disk"] = "disk"
        directory: Path
        """Where the folder is made. Every machine of the run must see the same disk at this absolute path."""

    def __init__(self, config: Config, trainer: Any, num_workers: int, engine: Any) -> None:
        if not config.directory.is_dir():
            raise ValueError(f"weights.directory {str(config.directory)!r} is no directory; make it first")
        super().__init__(make_folder(config.directory.absolute()), trainer)
