"""The regime `sync`: sample a batch, then train on it."""

from typing import Literal

from agent_rl.pipeline.regimes.base import RegimeConfig
from agent_rl.pipeline.schedule import Schedule
from agent_rl.registry import PartBase


class Sync(PartBase):
    """Samples a batch with the newest weights, then trains on it. The same seed gives the same bits.

    Episodes are sampled in waves of `rollout.max_concurrent_episodes`, so that what an engine batches together does not
    depend on time.
    """

    class Config(RegimeConfig):
        type: Literal["sync"] = "sync"

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, batch_groups: int, num_steps: int) -> Schedule:
        """The schedule; it does not depend on the arguments."""
        return Schedule(prefetch=0, broadcast_interval=1, waves=True)
