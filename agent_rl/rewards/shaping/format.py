r"""A reward for well-formed episodes."""

from typing import Literal

from agent_rl.rewards.base import FinishedEpisode
from agent_rl.rewards.shaping.base import Shaping, ShapingConfig
from agent_rl.verifier.extraction import extract_answer


class Format(Shaping):
    r"""1 if the episode ends with an answer in a closed `\boxed{}` and every tool call could be parsed, else 0."""

    class Config(ShapingConfig):
        type: Literal["format"] = "format"

    def __init__(self, config: Config) -> None:
        return

    def value(self, episode: FinishedEpisode) -> float:
        boxed = extract_answer(episode.final_text or "", ("boxed",))
        malformed = any(call.error for turn in episode.turns for call in turn.tool_calls)
        return float(bool(boxed and boxed.strip()) and not malformed)
