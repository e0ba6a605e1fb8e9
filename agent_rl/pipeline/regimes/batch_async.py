"""The regime `batch_async`: sample the next batches while training on this one."""

from typing import Literal, Self

from pydantic import Field, model_validator

from agent_rl.pipeline.regimes.base import RegimeConfig
from agent_rl.pipeline.schedule import Schedule
from agent_rl.registry import PartBase


class BatchAsync(PartBase):
    """Samples the next batches while it trains on this one. The lag of every batch is known beforehand.

    All tokens of a batch have one policy version. Give exactly one of `exact_lag` and `broadcast_interval`.
    """

    class Config(RegimeConfig):
        type: Literal["batch_async"] = "batch_async"
        exact_lag: int | None = Field(None, ge=0)
        """k: every batch is trained at lag min(step, k), in steps. Weights are broadcast after every step and k batches
        are kept ready. If a batch is used for U updates, update h = 0 .. U - 1 has lag min(step, k) * U + h, in
        optimizer steps."""
        broadcast_interval: int | None = Field(None, ge=1)
        """n: weights are broadcast every n steps and one batch is kept ready. The lag cycles through 1..n, in steps."""

        @model_validator(mode="after")
        def _one_of_two(self) -> Self:
            if (self.exact_lag is None) == (self.broadcast_interval is None):
                raise ValueError("give exactly one of exact_lag and broadcast_interval; set the other to null")
            return self

        @property
        def largest_lag(self) -> int:
            return self.broadcast_interval or self.exact_lag or 0

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, batch_groups: int, num_steps: int) -> Schedule:
        """The schedule; it does not depend on the arguments."""
        if self.config.exact_lag is not None:
            return Schedule(prefetch=self.config.exact_lag, broadcast_interval=1)
        return Schedule(prefetch=1, broadcast_interval=self.config.broadcast_interval or 1)
