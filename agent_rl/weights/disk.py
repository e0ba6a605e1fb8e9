"""Weights through a folder that trainer and engines both see, such as one of a shared filesystem."""

import shutil
import tempfile
from pathlib import Path
from typing import Literal

from agent_rl.registry import PartBase, PartConfig


class Disk(PartBase):
    """A folder of this run's own in `directory`, removed when the run ends."""

    class Config(PartConfig):
        type: Literal["disk"] = "disk"
        directory: Path
        """Where the folder is made; an absolute path that means the same on every machine of the run."""

    def __init__(self, config: Config) -> None:
        if not config.directory.is_dir():
            raise ValueError(f"weights.directory {str(config.directory)!r} is no directory; make it first")
        self._folder = Path(tempfile.mkdtemp(prefix="agent-rl-weights-", dir=config.directory.absolute()))

    def path(self, policy_version: int) -> Path:
        return self._folder / f"{policy_version}.safetensors"

    def retire(self, policy_version: int) -> None:
        self.path(policy_version).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
