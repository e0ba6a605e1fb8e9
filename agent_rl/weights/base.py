"""How a new policy version travels from the trainer to the engines."""

from pathlib import Path
from typing import Protocol


class WeightChannel(Protocol):
    """Gives each version a file: the trainer writes it as safetensors, engines read it."""

    def path(self, policy_version: int) -> Path:
        """Where the trainer writes this version."""
        ...

    def retire(self, policy_version: int) -> None:
        """No engine will read this version again; unknown versions are ignored."""
        ...

    def close(self) -> None: ...
