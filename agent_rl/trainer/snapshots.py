"""Recent weights by policy version, so that a token's log-prob can be recomputed at the version it was sampled with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.objective.token_batch import TokenBatch
from agent_rl.settings import Settings
from agent_rl.trainer.model import copy_weights, weights_of
from agent_rl.trainer.ranks import Ranks
from agent_rl.trainer.shards import clone
from agent_rl.trainer.token_logprobs import token_logprobs
from agent_rl.trainer.weight_file import read_weights


class ProximalConfig(Settings):
    """Proximal log-probs: the trainer's own, at the weights that a token was sampled with.

    They split the mismatch into policy lag and implementation. An objective that needs them gets them at
    every step for every token; these keys say when they are computed for the tables alone.
    """

    every: int = Field(0, ge=0)
    """Steps (rollout batches) between computations; 0 is never, unless the objective needs them."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the trajectories of such a step, chosen evenly by episode id."""
    max_snapshots: int = Field(16, ge=1)
    """Policy versions whose weights are kept, one a rollout batch; must exceed the lag in batches."""


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

    @torch.no_grad()
    def logprobs(self, model: Any, batches: Sequence[TokenBatch], ranks: Ranks) -> list[Tensor]:
        """Log-probs [T] of each micro-batch, every token's at its own policy version, computed with `model`.

        One pass for each version and micro-batch that holds tokens of it on some rank, of which all ranks are part.
        """
        found = [torch.zeros(len(batch)) for batch in batches]
        versions = [set(b.policy_versions[b.loss_mask].tolist()) for b in batches]
        by_microbatch = [set().union(*parts) for parts in zip(*ranks.gather(versions), strict=True)]
        for version in sorted(set().union(*by_microbatch)):
            self.load_into(model, version)
            for values, batch, present in zip(found, batches, by_microbatch, strict=True):
                if version in present:
                    own = batch.policy_versions == version
                    values[own] = token_logprobs(model, batch).logprobs[own]
        return found

    def load(self, directory: Path, model: Any) -> None:
        """Read the snapshots of a checkpoint, laid out as `model` is; nothing, if it was made without any."""
        layout = weights_of(model)
        self.weights = {int(path.stem): read_weights(path, layout) for path in directory.glob("*.safetensors")}
