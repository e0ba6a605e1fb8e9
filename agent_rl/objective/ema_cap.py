"""An absolute anchor for a relative reference: q may not exceed what it was early in the run. Ours."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agent_rl.objective.turn_reference import TurnReference

DECAY = 0.9
WARMUP_STEPS = 50


class EMACap:
    """Holds q to its exponential moving average over the first 50 steps, frozen after them.

    While it is learned nothing is capped: lag ramps up over the first steps, and a cap from q at lag 0 would gate
    everything. With references by turn each bucket has its own average.
    """

    def __init__(self) -> None:
        self.average: Tensor | None = None
        self.steps = 0

    def observe(self, reference: Tensor | TurnReference) -> None:
        """Take in the reference of one more step, if the average is not frozen yet."""
        if self.steps == WARMUP_STEPS:
            return
        q = _q(reference).double()
        self.average = q if self.average is None else DECAY * self.average + (1 - DECAY) * q
        self.steps += 1

    def apply(self, reference: Tensor | TurnReference) -> Tensor | TurnReference:
        """The reference with q at most the frozen average."""
        if self.steps < WARMUP_STEPS:
            return reference
        assert self.average is not None
        q = _q(reference)
        held = torch.minimum(q, self.average.to(q))
        return replace(reference, q=held) if isinstance(reference, TurnReference) else held

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.steps = state["average"], state["steps"]


def _q(reference: Tensor | TurnReference) -> Tensor:
    return reference.q if isinstance(reference, TurnReference) else reference
