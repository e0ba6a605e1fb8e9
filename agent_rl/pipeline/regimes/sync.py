"""Generate, then train, in waves: lag 0, and the same seed gives the same bits."""

from typing import Literal

from agent_rl.pipeline.schedule import Schedule
from agent_rl.registry import PartBase, PartConfig


class Sync(PartBase):
    class Config(PartConfig):
        type: Literal["sync"] = "sync"

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, batch_groups: int, num_steps: int) -> Schedule:
        return Schedule(prefetch=0, broadcast_interval=1, waves=True)
