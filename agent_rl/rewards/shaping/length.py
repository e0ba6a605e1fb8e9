"""A penalty on long episodes."""

from typing import Literal, Self

from pydantic import Field, model_validator

from agent_rl.rewards.base import FinishedEpisode
from agent_rl.rewards.shaping.base import Shaping, ShapingConfig


class Length(Shaping):
    """0 up to `free_tokens` sampled tokens, then falling in a straight line to -1 at `max_tokens`, and -1 beyond.

    The soft overlong punishment of DAPO, arXiv 2503.14476, eq. 13: free_tokens is its L_max - L_cache.
    """

    class Config(ShapingConfig):
        type: Literal["length"] = "length"
        free_tokens: int = Field(ge=0)
        """Sampled tokens, over all turns, that cost nothing."""
        max_tokens: int = Field(ge=1)
        """Sampled tokens from which on the penalty is -1."""

        @model_validator(mode="after")
        def _falls(self) -> Self:
            if self.free_tokens >= self.max_tokens:
                raise ValueError(f"free_tokens is {self.free_tokens}; it must be below max_tokens ({self.max_tokens})")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    def value(self, episode: FinishedEpisode) -> float:
        free, whole = self.config.free_tokens, self.config.max_tokens
        return -min(max((episode.num_sampled - free) / (whole - free), 0.0), 1.0)
