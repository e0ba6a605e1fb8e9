"""What a clip is: it looks at the log-ratios and says how far each token's ratio may go."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_rl.objective.quantile import Reduce
from agent_rl.objective.token_batch import ActiveTokens
from agent_rl.registry import PartBase


@dataclass(frozen=True, eq=False)
class Radii:
    """Trust region of A tokens: 1 - base_low * factor_low <= ratio <= 1 + base_high * factor_high.

    Factors float [A] in [0, 1], exactly 1 where nothing tightens; gate bool [A]: where the clip tightened;
    q float [A]: the mismatch quantile each token was compared with, or None if the clip has none.
    """

    base_low: float
    base_high: float
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
    def constant(log_ratio: Tensor, low: float, high: float) -> "Radii":
        """The same radii for every token."""
        ones = torch.ones_like(log_ratio)
        return Radii(low, high, ones, ones, torch.zeros_like(log_ratio, dtype=torch.bool))


class Clip(PartBase, ABC):
    """A part of kind `clip`. Radii and gate are constants of the gradient: `log_ratio` always comes detached."""

    needs_step_pass: bool = False
    """Whether `reference` must see all log-ratios of the step before the first micro-batch's loss."""
    needs_turns: bool = False
    """Whether every active token must have a turn id."""

    def reference(self, log_ratios: Sequence[Tensor], tokens: Sequence[ActiveTokens], reduce: Reduce | None) -> Any:
        """The step's statistic, from the log-ratios [A] of all micro-batches; called if `needs_step_pass`."""
        return None

    @abstractmethod
    def radii(self, log_ratio: Tensor, tokens: ActiveTokens, reference: Any) -> Radii:
        """The radii of one micro-batch with log-ratios [A]; `reference` is the step's statistic, if there is one."""
