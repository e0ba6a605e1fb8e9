"""The control of every SAT experiment: PPO at the radii that a SAT run had."""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agent_rl.jsonl import read_jsonl
from agent_rl.objective.clips.base import Clip, Radii
from agent_rl.objective.quantile import Reduce
from agent_rl.objective.token_batch import ActiveTokens
from agent_rl.registry import PartConfig

Low = Annotated[float, Field(gt=0, le=1)]
High = Annotated[float, Field(gt=0)]
Pair = tuple[Low, High]
_BY_TURN = re.compile(r"eps_eff_low_turn_(\d+)")


@dataclass(frozen=True)
class Pairs:
    """(low, high) radii: of turn k in `turns`, the last one for later turns too, or `pooled` where there are none."""

    pooled: Pair | None
    turns: tuple[Pair, ...] = ()


class Matched(Clip):
    """1 - low <= ratio <= 1 + high with radii taken from a SAT run: constant, by turn, or step by step.

    SAT has, on each batch, the gradient of PPO at a radius eps_eff(q), which it logs. PPO at the run's mean
    eps_eff tests whether tightness alone explains SAT; PPO at the schedule of a run with another seed, whether
    adapting to this very batch matters.
    """

    class Config(PartConfig):
        """Keys of `clip: matched`: eps_low with eps_high, or turns, or schedule."""

        type: Literal["matched"] = "matched"
        eps_low: Low | None = None
        """Constant radius below 1."""
        eps_high: High | None = None
        """Constant radius above 1."""
        turns: list[Pair] | None = Field(None, min_length=1)
        """Constant [low, high] by turn, the last for all later turns: for a SAT run with `turns`."""
        schedule: str | None = None
        """The run directory, or its metrics.jsonl, whose `eps_eff_low` and `eps_eff_high` of step j are used at
        step j of this run."""
        by_turn: bool = False
        """Read the schedule's radii by turn, which a SAT run with `turns` logs beside the mean ones."""

        @model_validator(mode="after")
        def _one_source(self) -> Self:
            if (self.eps_low is None) != (self.eps_high is None):
                raise ValueError("eps_low and eps_high are a pair: give both or neither")
            given = [self.eps_low is not None, self.turns is not None, self.schedule is not None]
            if sum(given) != 1:
                raise ValueError("the radii need exactly one source: eps_low with eps_high, turns, or schedule")
            if self.by_turn and self.schedule is None:
                raise ValueError("by_turn reads a schedule; for constant radii by turn use turns")
            if self.schedule is not None and not _file(self.schedule).is_file():
                raise ValueError(f"no metrics at {str(_file(self.schedule))!r}; name the directory of a SAT run")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs_turns = config.by_turn or config.turns is not None
        self.schedule = None if config.schedule is None else RadiiSchedule.read(_file(config.schedule), config.by_turn)

    def reference(
        self, step: int, log_ratios: Sequence[Tensor] | None, tokens: Sequence[ActiveTokens], reduce: Reduce | None
    ) -> Pairs:
        if self.schedule is not None:
            return self.schedule.at(step)
        if self.config.turns is not None:
            return Pairs(None, tuple(self.config.turns))
        assert self.config.eps_low is not None
        assert self.config.eps_high is not None
        return Pairs((self.config.eps_low, self.config.eps_high))

    def radii(self, log_ratio: Tensor, tokens: ActiveTokens, reference: Pairs) -> Radii:
        if not reference.turns:
            assert reference.pooled is not None
            return Radii.fixed(log_ratio, *reference.pooled)
        pairs = torch.tensor(reference.turns, dtype=log_ratio.dtype, device=log_ratio.device)
        low, high = pairs[tokens.turn_ids.clamp(max=len(pairs) - 1)].unbind(1)
        return Radii.fixed(log_ratio, low, high)


@dataclass(frozen=True)
class RadiiSchedule:
    """Radii by step; a step that the run skipped has those of the step before it, the first ones those that follow."""

    path: Path
    steps: tuple[int, ...]
    pairs: tuple[Pairs, ...]

    @staticmethod
    def read(path: Path, by_turn: bool) -> "RadiiSchedule":
        """The schedule in the metrics of a run. Raises `ValueError` if they hold no equivalent radii."""
        lines = [row for row in read_jsonl(path) if "eps_eff_low" in row or "skipped_empty" in row]
        rows = [row for row in lines if row.get("eps_eff_low") is not None]
        buckets = [int(found[1]) for row in rows for key in row if (found := _BY_TURN.fullmatch(key))]
        if not rows or (by_turn and not buckets):
            what = (
                "eps_eff_low_turn_*: its run must have clip sat with turns"
                if by_turn
                else "eps_eff_low: its run must have clip sat"
            )
            raise ValueError(f"{path} logs no {what}")
        num_turns = max(buckets, default=-1) + 1 if by_turn else 0
        pairs, last = list[Pairs](), _pairs(rows[0], num_turns)
        for row in lines:
            last = last if row.get("eps_eff_low") is None else _pairs(row, num_turns)
            pairs.append(last)
        return RadiiSchedule(path, tuple(row["step"] for row in lines), tuple(pairs))

    def at(self, step: int) -> Pairs:
        """The radii of a step. Raises `ValueError` outside of the steps that the schedule covers."""
        index = bisect.bisect_right(self.steps, step) - 1
        if index < 0 or step > self.steps[-1]:
            span = f"steps {self.steps[0]} to {self.steps[-1]}"
            raise ValueError(f"{self.path} has radii for {span}, not for step {step}; name a run that covers it")
        return self.pairs[index]


def _pairs(row: dict[str, Any], num_turns: int) -> Pairs:
    """The radii of one line of metrics; a turn without a token there has the mean ones."""
    pooled = (row["eps_eff_low"], row["eps_eff_high"])
    turns = [
        (row.get(f"eps_eff_low_turn_{k}", pooled[0]), row.get(f"eps_eff_high_turn_{k}", pooled[1]))
        for k in range(num_turns)
    ]
    return Pairs(pooled, tuple(turns))


def _file(schedule: str) -> Path:
    path = Path(schedule)
    return path / "metrics.jsonl" if path.is_dir() else path
