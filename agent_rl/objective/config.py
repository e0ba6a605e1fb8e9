"""The config of an objective. Light on purpose: nothing here imports torch until a clip is chosen."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from agent_rl import registry
from agent_rl.registry import PartKind
from agent_rl.settings import Settings

Level = Literal["token", "turn", "sequence"]
Denominator = Literal["behavior", "proximal"]
Aggregate = Literal["sequence_mean", "token_mean", "sequence_sum"]
Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]


class RatioConfig(Settings):
    """The importance ratio that is clipped."""

    level: Level = "token"
    """`token`: one ratio a token. `sequence`: exp of the response's mean log-ratio, on each of its tokens (GSPO).
    `turn`: exp of the mean log-ratio within each turn."""
    denominator: Denominator = "behavior"
    """`behavior`: what the engine really sampled from, after temperature and over the kept set. `proximal`: the
    trainer's own recomputation at the weights that each token was sampled with, which the step must then have."""
    length: float | None = Field(None, ge=1)
    """Level `sequence` only: the summed log-ratio is divided by this constant, in place of the response's own number
    of tokens, so that long responses do not count for less than short ones; docs/bound.md says what that buys. Null
    is GSPO as published."""


class KLConfig(Settings):
    """KL loss to a reference policy: the k3 estimator, clamped."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the KL loss; 0 switches it off, and no reference log-probs are needed then."""
    aggregate: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    """How the per-token KL is averaged, as in `objective.aggregate`."""


class AdvantageConfig(Settings):
    """How rewards become advantages; every estimator gives exactly 0 if all the rewards it compares are equal."""

    estimator: Estimator = "grpo"
    """`grpo`: (R - mean) / (std + 1e-6) within a group. `dr_grpo`: R - mean within a group. `rloo`: R - the mean of
    the group's other episodes. `reinforce_pp`: (R - mean) / (std + 1e-6) over the batch. `reinforce_pp_baseline`:
    R - mean within a group, then / (std + 1e-6) over the batch. std has ddof 1."""
    std_floor: float = Field(0.0, ge=0)
    """A std is taken to be at least this; 0 is the plain estimator."""
    filter_on: Literal["outcome", "reward"] = "outcome"
    """A group whose episodes all have the same outcome says nothing about right and wrong: its advantages are 0, even
    where shaping makes its rewards differ. `reward`: shaping teaches in such groups too. `reinforce_pp` has no groups.
    """

    @model_validator(mode="after")
    def _floor(self) -> Self:
        if self.std_floor and self.estimator in ("dr_grpo", "rloo"):
            raise ValueError(f"estimator {self.estimator} divides by no std; remove std_floor")
        return self


class ObjectiveConfig(Settings):
    """What is maximised: ratio, clip, surrogate, gates, aggregation, KL, and the advantage that goes in."""

    ratio: RatioConfig = Field(default_factory=RatioConfig)
    """Level and denominator of the importance ratio."""
    clip: Annotated[Any, PartKind("clip")] = Field({"type": "ppo"}, validate_default=True)
    """The trust region on the ratio: a file of `agent_rl/objective/clips/`."""
    surrogate: Annotated[Any, PartKind("surrogate")] = Field({"type": "clip"}, validate_default=True)
    """What is made of ratio, radii and advantage: a file of `agent_rl/objective/surrogates/`."""
    gates: list[Annotated[Any, PartKind("gate")]] = Field([])
    """Masks and weights on the tokens' terms, multiplied: files of `agent_rl/objective/gates/`."""
    aggregate: Aggregate = "sequence_mean"
    """`sequence_mean`: mean over responses of their token means. `token_mean`: mean over all active tokens.
    `sequence_sum`: mean over responses of their token sums divided by `sequence_length` (Dr. GRPO)."""
    sequence_length: int | None = Field(None, ge=1)
    """Tokens that a response's sum is divided by under `aggregate: sequence_sum`: the generation budget."""
    kl: KLConfig = Field(default_factory=KLConfig)
    """KL loss to a reference policy."""
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    """How rewards become advantages."""

    @model_validator(mode="after")
    def _length(self) -> Self:
        if (self.aggregate == "sequence_sum") != (self.sequence_length is not None):
            raise ValueError("aggregate sequence_sum and sequence_length come together: set both or neither")
        return self

    @model_validator(mode="after")
    def _constant_length(self) -> Self:
        if self.ratio.length is None:
            return self
        if self.ratio.level != "sequence":
            raise ValueError(f"ratio.length is for level sequence, not {self.ratio.level}; remove it")
        if self.aggregate != "sequence_mean":
            raise ValueError("ratio.length makes one term of a response; set aggregate to sequence_mean")
        return self

    @model_validator(mode="after")
    def _composes(self) -> Self:
        parts = [("clip", self.clip), ("surrogate", self.surrogate), *(("gate", gate) for gate in self.gates)]
        for kind, part in parts:
            reason = registry.find(kind, part.type).conflict(part, self)
            if reason is not None:
                raise ValueError(reason)
        return self
