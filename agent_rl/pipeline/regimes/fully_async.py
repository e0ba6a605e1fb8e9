"""Generate without a pause: weights are pushed while episodes run, and no batch is older than `max_lag`."""

from typing import Literal

from pydantic import Field

from agent_rl.pipeline.pacing import Pacing
from agent_rl.registry import PartBase, PartConfig


class FullyAsync(PartBase):
    class Config(PartConfig):
        type: Literal["fully_async"] = "fully_async"
        max_lag: int = Field(1, ge=0)
        """No token is first trained on more than so many rollout batches after it was sampled. Where a batch is used
        for U updates, each a policy version, the last one sees a lag of at most max_lag * U + U - 1 versions."""
        max_groups: int | None = Field(None, ge=1)
        """The most groups in flight and queued at once; null is (max_lag + 1) x batch.num_prompts, which admission
        by lag never exceeds. A smaller number holds less in memory and makes the data fresher."""
        overdue: Literal["wait", "drop"] = "wait"
        """When a step could go on but for a group that is still being sampled and would be too old at the next:
        `wait` for it, which keeps slow, hard prompts, or `drop` it, counted by the reason `overdue`."""
        update: Literal["in_flight", "drain", "abort"] = "in_flight"
        """How engines take new weights. `in_flight`: running generations go on with them. `drain`: running
        generations end first and no new one starts. `abort`: running generations are cut, and their turns go on
        from what they had sampled. Episodes always go on; every token carries its version."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, batch_groups: int, num_steps: int) -> Pacing:
        """Raises `ValueError` if the bound on groups is below a batch."""
        max_groups = self.config.max_groups or (self.config.max_lag + 1) * batch_groups
        if max_groups < batch_groups:
            raise ValueError(
                f"pipeline.max_groups is {max_groups}, but a step takes batch.num_prompts = {batch_groups} groups; "
                "raise it or set it to null"
            )
        return Pacing(batch_groups, self.config.max_lag, max_groups, num_steps, self.config.overdue == "wait")
