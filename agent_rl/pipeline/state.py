"""The state of a run between two steps, which a checkpoint keeps beside the weights and the optimizer."""

import json
from pathlib import Path
from typing import Self

from agent_rl.settings import Settings, check

FILE = "state.json"
SERVED_WEIGHTS = "served.safetensors"
EVALUATED_WEIGHTS = "evaluated.safetensors"


def policy_version_at(step: int, updates_per_batch: int) -> int:
    """The policy version of the weights that `step` begins with: the optimizer steps behind them."""
    return step * updates_per_batch


class RunState(Settings):
    """How far a run has come: what is trained, and what is sampled or issued but not trained."""

    step: int = 0
    """Rollout batches trained."""
    updates_per_batch: int = 1
    """Optimizer steps on each of them."""
    queue: dict[int, list[int]] = {}  # noqa: RUF012
    """The groups of each batch that is sampled and not trained. The batches are consecutive and begin at `step`."""
    versions: dict[int, int] = {}  # noqa: RUF012
    """Only for `fully_async`: for each group that is issued and not trained, the step whose weights the engines served
    at its issue."""
    arrived: list[int] = []  # noqa: RUF012
    """The groups of `versions` that are sampled, in the order of arrival. On resuming the others are issued again."""
    evaluating: int | None = None
    """The step whose weights were being evaluated beside training. Resuming starts that evaluation again."""
    ramps: tuple[tuple[int, int], ...] = ((0, 0),)
    """See `Schedule.ramps`."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps done."""
        return policy_version_at(self.step, self.updates_per_batch)

    def save(self, checkpoint: Path) -> None:
        """Write the state into the folder `checkpoint`."""
        (checkpoint / FILE).write_text(self.model_dump_json())

    @classmethod
    def load(cls, checkpoint: Path) -> Self:
        """Read what `save` wrote. Raises `ValueError` if it is not a valid state."""
        return check(cls, json.loads((checkpoint / FILE).read_text()), str(checkpoint / FILE))
