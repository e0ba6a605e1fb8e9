"""The sum of an outcome and of shaping terms; each is logged."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from agent_rl import registry
from agent_rl.registry import PartConfig, PartKind
from agent_rl.rewards.base import FinishedEpisode, Reward, Score


class CompositeReward(Reward):
    """outcome_weight * the outcome's reward + the sum of weight * value over the shaping terms.

    Parts: those of the outcome, unweighted, and for each shaping term what it adds, under its name. The outcome
    alone decides whether an episode is masked.
    """

    class Config(PartConfig):
        type: Literal["composite"] = "composite"
        outcome: Annotated[Any, PartKind("reward")] = Field({"type": "math"}, validate_default=True)
        """Whether the answer is right: another reward."""
        outcome_weight: float = Field(1.0, gt=0)
        """Factor on the outcome's reward."""
        shaping: list[Annotated[Any, PartKind("shaping")]] = Field([])
        """Terms that are added: files of `agent_rl/rewards/shaping/`, each with its `weight`."""

        @model_validator(mode="after")
        def _distinct(self) -> Self:
            names = [part_name(part.type) for part in self.shaping]
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"shaping has {', '.join(sorted(twice))} twice; give each term once")
            return self

    def __init__(self, config: Config) -> None:
        self.outcome_weight = config.outcome_weight
        self.outcome: Reward = registry.build("reward", config.outcome)
        self.shaping = {part_name(part.type): (part.weight, registry.build("shaping", part)) for part in config.shaping}

    async def score(self, episode: FinishedEpisode) -> Score:
        score = await self.outcome.score(episode)
        added = {name: weight * part.value(episode) for name, (weight, part) in self.shaping.items()}
        if clash := added.keys() & score.parts.keys():
            raise ValueError(f"the outcome has a part named {', '.join(clash)} already; leave that shaping term out")
        reward = self.outcome_weight * score.reward + sum(added.values())
        return Score(reward, {**score.parts, **added}, score.mask_reason)

    def answer(self, final_text: str) -> str | None:
        return self.outcome.answer(final_text)

    async def close(self) -> None:
        await self.outcome.close()


def part_name(path: str) -> str:
    """The short name of a term: `length` for `length`, `Brevity` for `my_package.my_module.Brevity`."""
    return path.rpartition(".")[2]
