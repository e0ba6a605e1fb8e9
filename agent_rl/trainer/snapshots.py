"""Recent weights by policy version, so that a token's log-prob can be recomputed at the version it was sampled with."""

from pathlib import Path
from typing import Any

from torch import Tensor

from agent_rl.trainer.model import copy_weights, weights_of
from agent_rl.trainer.shards import clone
from agent_rl.trainer.weight_file import read_weights


class Snapshots:
    """The newest `capacity` policy versions, as copies of their weights: of each, the shards of this rank."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.weights: dict[int, dict[str, Tensor]] = {}

    def keep(self, policy_version: int, model: Any) -> None:
        """Remember the weights of `model` as `policy_version`; the oldest beyond the capacity are forgotten."""
        self.weights[policy_version] = {name: clone(w) for name, w in weights_of(model).items()}
        for version in sorted(self.weights)[: -self.capacity]:
            del self.weights[version]

    def load_into(self, model: Any, policy_version: int) -> None:
        """Give `model` the weights of a version. Raises `ValueError` naming a version that is not kept."""
        if policy_version not in self.weights:
            kept = ", ".join(map(str, sorted(self.weights))) or "none"
            raise ValueError(
                f"the weights of policy version {policy_version} are not kept (there are: {kept}); "
                "raise trainer.proximal.max_snapshots above the lag"
            )
        copy_weights(self.weights[policy_version], model)

    def load(self, directory: Path, model: Any) -> None:
        """Read the snapshots of a checkpoint, laid out as `model` is; nothing, if it was made without any."""
        layout = weights_of(model)
        self.weights = {int(path.stem): read_weights(path, layout) for path in directory.glob("*.safetensors")}
