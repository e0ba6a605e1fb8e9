"""Recent weights by policy version, so that a token's log-prob can be recomputed at the version it was sampled with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from agent_rl.settings import Settings
from agent_rl.trainer.model import copy_weights, weights_of


class ProximalConfig(Settings):
    """Proximal log-probs: the trainer's own, at the weights that a token was sampled with.

    They split the mismatch into policy lag and implementation. An objective that needs them gets them at
    every step for every token; these keys say when they are computed for the tables alone.
    """

    every: int = Field(0, ge=0)
    """Optimizer steps between computations; 0 is never, unless the objective needs them."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the trajectories of such a step, chosen evenly by episode id."""
    max_snapshots: int = Field(16, ge=1)
    """Policy versions whose weights are kept; must exceed the lag."""


class Snapshots:
    """The newest `capacity` policy versions, as copies of their weights."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._weights: dict[int, dict[str, Tensor]] = {}

    def keep(self, policy_version: int, model: Any) -> None:
        """Remember the weights of `model` as `policy_version`; the oldest beyond the capacity are forgotten."""
        self._weights[policy_version] = {name: w.detach().clone() for name, w in weights_of(model).items()}
        for version in sorted(self._weights)[: -self.capacity]:
            del self._weights[version]

    def load_into(self, model: Any, policy_version: int) -> None:
        """Give `model` the weights of a version. Raises `ValueError` naming a version that is not kept."""
        if policy_version not in self._weights:
            kept = ", ".join(map(str, sorted(self._weights))) or "none"
            raise ValueError(
                f"the weights of policy version {policy_version} are not kept (there are: {kept}); "
                "raise trainer.proximal.max_snapshots above the lag"
            )
        copy_weights(self._weights[policy_version], model)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for version, weights in self._weights.items():
            save_file(weights, directory / f"{version}.safetensors")

    def load(self, directory: Path) -> None:
        """Read what `save` wrote; nothing, if a checkpoint was made without snapshots."""
        self._weights = {int(path.stem): load_file(path) for path in _files(directory)}


def _files(directory: Path) -> Iterator[Path]:
    return directory.glob("*.safetensors")
