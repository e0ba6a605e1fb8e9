"""Weights through memory that the processes of one machine share, as safetensors files."""

from typing import Any, Literal

from agent_rl.registry import PartBase, PartConfig
from agent_rl.weights.base import FileChannel
from agent_rl.weights.transfer.memory import make_folder


class SharedMemory(FileChannel, PartBase):
    """A private folder in /dev/shm, or in the temporary folder where the system has no such mount."""

    class Config(PartConfig):
        type: Literal["shared_memory"] = "shared_memory"

    def __init__(self, config: Config, trainer: Any, num_workers: int, engine: Any) -> None:
        super().__init__(make_folder(), trainer)
