"""A reward for successful tool calls."""

from typing import Literal

from pydantic import Field

from agent_rl.rewards.base import FinishedEpisode
from agent_rl.rewards.shaping.base import Shaping, ShapingConfig


class ToolUse(Shaping):
    """min(successful calls, enough) / enough - error_weight * the share of calls that failed; 0 without a call.

    A call succeeds if its tool says so: for python, if the program ran to its end. Never above 1, whatever the
    number of calls.
    """

    class Config(ShapingConfig):
        type: Literal["tool_use"] = "tool_use"
        enough: int = Field(1, ge=1)
        """Successful calls from which on more earn nothing."""
        error_weight: float = Field(0.0, ge=0)
        """What an episode loses if all of its calls fail."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def value(self, episode: FinishedEpisode) -> float:
        results = [result for turn in episode.turns for result in turn.tool_results]
        if not results:
            return 0.0
        succeeded = sum(result.ok for result in results)
        failed = 1 - succeeded / len(results)
        return min(succeeded, self.config.enough) / self.config.enough - self.config.error_weight * failed
