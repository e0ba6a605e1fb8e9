"""Weights through memory that the processes of one machine share, as safetensors files."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from agent_rl.registry import PartBase, PartConfig

_MEMORY = Path("/dev/shm")
_PREFIX = "agent-rl-weights-"


class SharedMemory(PartBase):
    """A private folder in /dev/shm, or in the temporary folder where the system has no such mount."""

    class Config(PartConfig):
        type: Literal["shared_memory"] = "shared_memory"

    def __init__(self, config: Config) -> None:
        parent = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        _sweep(parent)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))

    def path(self, policy_version: int) -> Path:
        return self._folder / f"{policy_version}.safetensors"

    def retire(self, policy_version: int) -> None:
        self.path(policy_version).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove what runs left that were killed: folders of processes that are no more."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        process_id = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process_id.isdigit() and not Path(f"/proc/{process_id}").exists():
            shutil.rmtree(folder, ignore_errors=True)
