"""The config of an objective. Light on purpose: nothing here imports torch until a clip is chosen."""

from typing import Annotated, Any, Literal

from pydantic import Field

from agent_rl.registry import PartKind
from agent_rl.settings import Settings

Level = Literal["token", "turn", "sequence"]
Aggregate = Literal["sequence_mean", "token_mean"]


class RatioConfig(Settings):
    """The importance ratio that is clipped."""

    level: Level = "token"
    """`token`: one ratio a token. `sequence`: exp of the response's mean log-ratio, on each of its tokens (GSPO).
    `turn`: exp of the mean log-ratio within each turn."""
    denominator: Literal["behavior"] = "behavior"
    """`behavior`: what the engine really sampled from, after temperature and over the kept set."""


class KLConfig(Settings):
    """KL loss to a reference policy: the k3 estimator, clamped."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the KL loss; 0 switches it off, and no reference log-probs are needed then."""
    aggregate: Aggregate = "sequence_mean"
    """How the per-token KL is averaged, as in `objective.aggregate`."""


class AdvantageConfig(Settings):
    """Group-relative advantage (GRPO): (R - mean) / (std + 1e-6) within a group, std with ddof 1."""

    estimator: Literal["grpo"] = "grpo"
    """`grpo`: rewards standardised within their group; needs groups of at least two."""
    std_floor: float = Field(0.0, ge=0)
    """The std of a group is taken to be at least this; 0 is plain GRPO."""


class ObjectiveConfig(Settings):
    """What is maximised: ratio, clip, aggregation, KL, and the advantage that goes in."""

    ratio: RatioConfig = Field(default_factory=RatioConfig)
    """Level and denominator of the importance ratio."""
    clip: Annotated[Any, PartKind("clip")] = Field({"type": "ppo"}, validate_default=True)
    """The trust region on the ratio: a file of `agent_rl/objective/clips/`."""
    aggregate: Aggregate = "sequence_mean"
    """`sequence_mean`: mean over responses of their token means. `token_mean`: mean over all active tokens."""
    kl: KLConfig = Field(default_factory=KLConfig)
    """KL loss to a reference policy."""
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    """How rewards become advantages."""
