"""What a regime's config tells the other stages."""

from typing import Literal

from agent_rl.registry import PartConfig

WeightUpdate = Literal["in_flight", "drain", "abort"]


class RegimeConfig(PartConfig):
    """What a regime's `Config` derives from; the defaults are those of `sync`."""

    @property
    def largest_lag(self) -> int:
        """The largest lag of a token when it is first trained on, in rollout batches."""
        return 0

    @property
    def weight_update(self) -> WeightUpdate:
        """What new weights do to generations that run."""
        return "in_flight"
