"""The regime `fully_async`: sample without a pause, with a bound on the lag."""

from typing import Literal

from pydantic import Field

from agent_rl.pipeline.pacing import Pacing
from agent_rl.pipeline.regimes.base import RegimeConfig, WeightUpdate
from agent_rl.registry import PartBase


class FullyAsync(PartBase):
    """Samples without a pause: a step trains on groups that have arrived, and engines load new weights while episodes
    run.

    An episode may have tokens of several policy versions. No trained token exceeds `max_lag`. A run is not
    reproducible.
    """

    class Config(RegimeConfig):
        type: Literal["fully_async"] = "fully_async"
        max_lag: int = Field(1, ge=0)
        """Bound on the lag of a token when it is first trained on, in rollout batches. If a batch is used for U
        updates, each makes a policy version, and the last one has a lag of at most max_lag * U + U - 1 versions."""
        max_groups: int | None = Field(None, ge=1)
        """Bound on the groups that are in flight or queued. null is (max_lag + 1) x batch.num_prompts, which `max_lag`
        implies. A smaller number takes less memory and makes the data fresher."""
        overdue: Literal["wait", "drop"] = "wait"
        """What a step does about a group that is still being sampled and would be too old for the next step. `wait`
        waits for it, which keeps slow, hard prompts. `drop` drops it with the reason `overdue`."""
        update: WeightUpdate = "in_flight"
        """How engines load new weights. `in_flight`: running generations continue with them. `drain`: running
        generations end first, and no new one starts meanwhile. `abort`: running generations are cut, and their turns
        continue from the tokens sampled so far. Episodes always continue; every token carries its policy version."""

        @property
        def largest_lag(self) -> int:
            return self.max_lag

        @property
        def weight_update(self) -> WeightUpdate:
            return self.update

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, batch_groups: int, num_steps: int) -> Pacing:
        """The pacing of a run with `batch_groups` groups a step. Raises `ValueError` if `max_groups` is below that."""
        max_groups = self.config.max_groups or (self.config.max_lag + 1) * batch_groups
        if max_groups < batch_groups:
            raise ValueError(
                f"pipeline.max_groups is {max_groups}, but a step takes batch.num_prompts = {batch_groups} groups; "
                "raise it or set it to null"
            )
        return Pacing(batch_groups, self.config.max_lag, max_groups, num_steps, self.config.overdue == "wait")
