"""Where a run stands between two steps: what a checkpoint keeps beside weights and optimizer."""

import json
from pathlib import Path
from typing import Self

from agent_rl.settings import Settings, check

FILE = "state.json"
SERVED_WEIGHTS = "served.safetensors"
EVALUATED_WEIGHTS = "evaluated.safetensors"


class RunState(Settings):
    """`step` batches are trained; the prompt stream stands at the first batch that is neither trained nor queued."""

    step: int = 0
    """Rollout batches trained."""
    updates_per_batch: int = 1
    """Optimizer steps that each of them was used for."""
    queue: dict[int, list[int]] = {}  # noqa: RUF012
    """Batches that are sampled and wait to be trained, without a gap from `step` on: their groups."""
    versions: dict[int, int] = {}  # noqa: RUF012
    """Of `fully_async`: the groups that are issued and not trained, with the policy version at their issue."""
    arrived: list[int] = []  # noqa: RUF012
    """Those of `versions` that are sampled, in the order of their arrival. The others are issued again."""
    evaluating: int | None = None
    """The step whose version was being evaluated on workers of its own; it is evaluated again on resuming."""
    ramps: tuple[tuple[int, int], ...] = ((0, 0),)
    """See `Schedule.ramps`."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps done."""
        return self.step * self.updates_per_batch

    def save(self, checkpoint: Path) -> None:
        (checkpoint / FILE).write_text(self.model_dump_json())

    @classmethod
    def load(cls, checkpoint: Path) -> Self:
        return check(cls, json.loads((checkpoint / FILE).read_text()), str(checkpoint / FILE))
