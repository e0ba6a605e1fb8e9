"""Generate ahead while training: every batch is trained at a lag that is known beforehand."""

from typing import Literal, Self

from pydantic import Field, model_validator

from agent_rl.pipeline.schedule import Schedule
from agent_rl.registry import PartBase, PartConfig


class BatchAsync(PartBase):
    class Config(PartConfig):
        type: Literal["batch_async"] = "batch_async"
        exact_lag: int | None = Field(None, ge=0)
        """Every batch is trained at lag min(step, k): weights go out after every step, k batches are kept ready.
        Where a batch is used for U updates, they are at lag min(step, k) * U + h, h = 0 .. U - 1, in optimizer
        steps."""
        broadcast_interval: int | None = Field(None, ge=1)
        """Weights go out every n steps and one batch is kept ready: the lag cycles through 1..n."""

        @model_validator(mode="after")
        def _one_of_two(self) -> Self:
            if (self.exact_lag is None) == (self.broadcast_interval is None):
                raise ValueError("give exactly one of exact_lag and broadcast_interval; set the other to null")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, batch_groups: int, num_steps: int) -> Schedule:
        if self.config.exact_lag is not None:
            return Schedule(prefetch=self.config.exact_lag, broadcast_interval=1)
        return Schedule(prefetch=1, broadcast_interval=self.config.broadcast_interval or 1)
