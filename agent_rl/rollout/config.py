"""How episodes are driven and sampled: the keys under `rollout` in a run's config."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from agent_rl.records import StopReason
from agent_rl.registry import PartKind
from agent_rl.settings import Settings


class SamplingConfig(Settings):
    """How training episodes are sampled. Stamped on every record; the trainer applies the same."""

    temperature: float = Field(1.0, gt=0)
    """Logits are divided by this. Above 0: a greedy policy has no log-prob to learn from."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 samples the full vocabulary."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 is off."""

    @field_validator("top_p")
    @classmethod
    def _top_p(cls, value: float) -> float:
        if not 0 < value <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {value}; 1 samples the full vocabulary")
        return value

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError(f"top_k must be -1 (off) or at least 1, got {value}")
        return value


class TruncatedConfig(Settings):
    """What happens to an episode that its budget cut short."""

    policy: Literal["score", "zero", "penalty", "mask"] = "score"
    """`score`: the reward as it is (0 from `math`, since there is no answer). `zero`: reward 0, whatever shaping
    gave. `penalty`: the reward minus `penalty`. `mask`: not trained on, and left out of its group's baseline."""
    penalty: float = Field(0.5, gt=0)
    """What `policy: penalty` subtracts from the reward."""
    stop_reasons: tuple[StopReason, ...] = (StopReason.MAX_TOKENS, StopReason.DEADLINE)
    """Stop reasons that count as cut short; `max_tool_turn` can be added."""

    @field_validator("stop_reasons")
    @classmethod
    def _cut(cls, value: tuple[StopReason, ...]) -> tuple[StopReason, ...]:
        if StopReason.ANSWER in value:
            raise ValueError("an episode that ends with an answer is not cut short; remove answer")
        return value


class RolloutConfig(Settings):
    """How episodes are driven."""

    num_workers: int = Field(1, ge=1)
    """Ray actors, each with its own engine."""
    max_concurrent_episodes: int = Field(128, ge=1)
    """Episodes that one worker has in flight at once."""
    max_tool_turn: int = Field(6, ge=0)
    """Assistant turns with a tool call (malformed ones included) that an episode may take; a further one ends it."""
    max_calls_per_turn: int = Field(8, ge=1)
    """Tool calls that are made of those in one assistant turn; each further one is answered with an error."""
    max_turn_tokens: int = Field(256, ge=1)
    """Sampled tokens in one assistant turn."""
    max_episode_tokens: int = Field(1024, ge=2)
    """Tokens in one episode: prompt, sampled and tool output together. After a longer prompt nothing is sampled."""
    max_tool_output_tokens: int = Field(256, ge=32)
    """Tool output beyond this many tokens is cut, with a marker that says so."""
    deadline_s: float = Field(120.0, gt=0)
    """Wall seconds an episode may take; looked at before each turn and each tool call."""
    max_attempts: int = Field(3, ge=1)
    """How often an episode is issued, the first time included, when the infrastructure fails under it."""
    truncated: TruncatedConfig = TruncatedConfig()
    """What an episode earns if its budget cut it short."""
    reward_errors: Literal["drop", "reissue"] = "drop"
    """When the reward itself raises: `drop` the episode's group, with the reason RewardError, or `reissue` the episode
    up to `max_attempts` times and drop its group after that."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn in training, and in evaluation unless `eval.sampling` says otherwise."""
    engine: Annotated[Any, PartKind("engine")] = Field({"type": "embedded"}, validate_default=True)
    """What samples: a file of `agent_rl/rollout/engines/`."""
    tool_format: Annotated[Any, PartKind("tool_format")] = Field({"type": "hermes"}, validate_default=True)
    """How the model writes a call: a file of `agent_rl/rollout/tool_formats/`."""
    tools: list[Annotated[Any, PartKind("tool")]] = Field([{"type": "python"}], validate_default=True)
    """What the model can call: files of `tools/`."""
