"""Weights through safetensors files in the shared memory of one machine."""

from typing import Any, Literal

from agent_rl.registry import PartBase, PartConfig
from agent_rl.weights.base import FileChannel
from agent_rl.weights.transfer.memory import make_folder


class SharedMemory(FileChannel, PartBase):
    """Writes each version to a file in a private folder in /dev/shm. The run must be on one machine.

    The folder is in the temporary directory if the system has no /dev/shm.
    """

    class Config(PartConfig):
        type: Literal["shared_memory"] = "shared_memory"

    def __init__(self, config: Config, trainer: Any, num_workers: int, engine: Any) -> None:
        super().__init__(make_folder(), trainer)
