"""The interface of clips: a clip says, from the log-ratios, how far each token's ratio may go."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_rl.objective.part import ObjectivePart
from agent_rl.objective.quantile import Reduce
from agent_rl.objective.token_batch import ActiveTokens


@dataclass(frozen=True, eq=False)
class Radii:
    """Trust region of A tokens: 1 - base_low * factor_low <= ratio <= 1 + base_high * factor_high.

    Bases are numbers or float [A]. Factors float [A] in [0, 1], exactly 1 where nothing tightens; gate bool [A]:
    where the clip tightened; q float [A]: the mismatch quantile each token was compared with, or None if the clip
    has none.
    """

    base_low: float | Tensor
    base_high: float | Tensor
    factor_low: Tensor
    factor_high: Tensor
    gate: Tensor
    q: Tensor | None = None

    @property
    def low(self) -> Tensor:
        return self.base_low * self.factor_low

    @property
    def high(self) -> Tensor:
        return self.base_high * self.factor_high

    @staticmethod
    def fixed(log_ratio: Tensor, low: float | Tensor, high: float | Tensor) -> "Radii":
        """Radii that nothing tightens: the same for every token, or one each, [A]."""
        ones = torch.ones_like(log_ratio)
        return Radii(low, high, ones, ones, torch.zeros_like(log_ratio, dtype=torch.bool))


class Clip(ObjectivePart, ABC):
    """A part of kind `clip`. Radii and gate are constants of the gradient: `log_ratio` always comes detached."""

    needs_step_pass: bool = False
    """Whether `reference` must see all log-ratios of the step before the first micro-batch's loss."""
    learns: bool = False
    """Whether `end_step` must see every step."""
    gates_on_behavior: bool = False
    """Whether `log_ratio` is the one to the behaviour policy, whatever the ratio that is clipped."""

    def reference(
        self, step: int, log_ratios: Sequence[Tensor] | None, tokens: Sequence[ActiveTokens], reduce: Reduce | None
    ) -> Any:
        """The statistic that all micro-batches of an optimizer step share, from all of this rank's, or None.

        `step` is the number of the rollout batch, which its updates share. `log_ratios`, [A] each, are there only if
        `needs_step_pass`.
        """
        return None

    @abstractmethod
    def radii(self, log_ratio: Tensor, tokens: ActiveTokens, reference: Any) -> Radii:
        """The radii of one micro-batch with log-ratios [A]; `reference` is what `reference` gave for its step."""

    def end_step(
        self, reference: Any, log_ratios: Sequence[Tensor], tokens: Sequence[ActiveTokens], reduce: Reduce | None
    ) -> None:
        """Learn from the step that was trained; called if `learns`."""

    def state_dict(self) -> dict[str, Any]:
        """The state that later steps depend on: numbers, tensors and dicts of them. Empty without state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
