"""The auxiliary loss of a mixture of experts that evens out how many tokens each expert gets, over a whole step."""

from typing import Any

import torch
from torch import Tensor

from agent_rl.objective.quantile import Reduce
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.routers import routers
from agent_rl.trainer.packing import is_dummy


class LoadBalancing:
    """The loss of one step: `count` every micro-batch, then take `loss` of each, right after its forward pass.

    coefficient * mean over layers of E * sum_e f_e P_e, with f_e the share of the step's (token, choice) pairs that
    went to expert e, a constant, and P_e the mean router probability of e over the step's tokens (arXiv 2101.03961, eq.
    4, over the global batch as in arXiv 2501.11873). With all even it is the coefficient. Being linear in P it is a sum
    over tokens, to which micro-batches and ranks add their parts. Prompt and tool tokens count, dummies do not; where
    routing is replayed, the replayed experts count.
    """

    def __init__(self, model: Any, coefficient: float, reduce: Reduce | None) -> None:
        self._layers = list(routers(model)) if coefficient else []
        self._num_experts = model.config.num_experts if self._layers else 0
        self._coefficient, self._reduce = coefficient, reduce
        self._counts = torch.zeros(len(self._layers), self._num_experts, dtype=torch.float64)
        self._num_tokens = 0.0
        self._shares: Tensor | None = None
        self._total = 0.0

    @property
    def is_on(self) -> bool:
        """Whether there is anything to balance."""
        return bool(self._layers)

    def count(self, model: Any, batch: TokenBatch) -> None:
        """Take in which experts the forward pass that `model` has just made on `batch` chose."""
        if self.is_on and not is_dummy(batch):
            self._num_tokens += len(batch)
            for row, layer in enumerate(self._layers):
                chosen = model.routing_replay.chosen[layer].flatten()
                self._counts[row] += torch.bincount(chosen, minlength=self._num_experts).cpu()

    def loss(self, model: Any, batch: TokenBatch) -> Tensor:
        """The part of the loss of the forward pass that `model` has just made on `batch`, 0-dim, with gradient.

        The first call sums the counts over ranks, so every rank makes it.
        """
        if not self.is_on:
            return torch.zeros(())
        if self._shares is None:
            sums = torch.cat([self._counts.flatten(), torch.tensor([self._num_tokens], dtype=torch.float64)])
            sums = sums if self._reduce is None else self._reduce(sums)
            self._counts, self._num_tokens = sums[:-1].view_as(self._counts), float(sums[-1])
            self._shares = (self._counts / self._counts.sum(1, keepdim=True)).float()
        if is_dummy(batch):
            return torch.zeros(())
        logits = torch.stack([model.routing_replay.logits[layer] for layer in self._layers])  # [layers, T, E]
        masses = logits.float().softmax(-1).sum(1)
        scale = self._coefficient * self._num_experts / (len(self._layers) * self._num_tokens)
        found = scale * (self._shares * masses.to(self._shares.device)).sum()
        self._total += float(found.detach())
        return found

    def metrics(self) -> dict[str, float]:
        """`load_balancing`: the step's loss without the coefficient; nothing where it is off."""
        if not self.is_on:
            return {}
        total = torch.tensor(self._total, dtype=torch.float64)
        return {"load_balancing": float(total if self._reduce is None else self._reduce(total)) / self._coefficient}
