"""The improvement bound's audit of a run, turn by turn. Reads files only."""

from pathlib import Path
from typing import Any

import polars as pl

from agent_rl.analysis.recorded import RecordedRun
from agent_rl.config import read_yaml
from agent_rl.objective.intervals import bernstein_margin, visited_interval

CAPTION = "share of the improvement bound's budget by turn; past 1 in all it says nothing: compare turns, not runs"
_FIGURES = ("tv", "off_support", "ratio_drift", "gspo_gap")
_ALL = -1


def bound_by_turn(run: RecordedRun, first_step: int = 0) -> pl.DataFrame:
    """What the distance from the rollouts cost from step `first_step` on, one row a turn and one for all.

    Every figure is a sum over tokens, averaged over all episodes of those steps; an episode that did not reach a turn
    counts as 0. Where a batch is trained on several times only the first use counts: afterwards the policy depends on
    these very samples, and they estimate nothing. With top-p or top-k only the steps count whose mass off the kept sets
    was computed, if any was (`trainer.off_support_every`). Columns: turn ("all" last); n, tokens; tv; off_support (NaN
    with full support, and where it was never computed); budget = tv + off_support, the share of 2 xi that the turn
    uses: a relative figure, since at 1 in all the bound is vacuous; share, the turn's share of the budget of all turns;
    low and high, limits of the budget at the states that were visited; mean_low and mean_high, limits of its
    expectation over episodes on the same prompts (empirical Bernstein; wide for few episodes); state_shift, the budget
    of earlier turns; ratio_drift, near 0 if the log-probs are right; gspo_gap, what GSPO's surrogate with its length
    restored gives away.
    Every limit is one-sided and wrong with probability 0.05. Raises `ValueError` if nothing was recorded.
    """
    rows, num_episodes = _audited(run, first_step)
    cut = bool(rows["off_support"].is_not_null().any())
    turn_span, episode_span = _spans(run.path, 1 + cut)
    *turns, whole = _means(rows, num_episodes).iter_rows(named=True)
    by_turn, shift = [], 0.0
    for turn in turns:
        by_turn.append(_row(turn, whole, num_episodes, turn_span, shift))
        shift += _budget(turn)
    table = pl.DataFrame([*by_turn, _row(whole, whole, num_episodes, episode_span, 0.0) | {"turn": "all"}])
    return table if cut else table.with_columns(off_support=pl.lit(float("nan")))


def _means(rows: pl.DataFrame, num_episodes: int) -> pl.DataFrame:
    """One row a turn, that of all turns last: turn, n, `_FIGURES`, and `square`, the sum of the squared penalties."""
    episodes = pl.col("num_episodes")
    mean = pl.col("tv") + pl.col("off_support").fill_null(0)
    square = (episodes - 1) * pl.col("penalty_var").fill_nan(0) + episodes * mean.pow(2)
    means = [((pl.col(name) * episodes).sum() / num_episodes).alias(name) for name in _FIGURES]
    turns = rows.group_by("turn").agg(pl.col("n").sum(), *means, square.sum().alias("square"))
    return turns.sort(pl.col("turn") == _ALL, "turn")


def _row(turn: dict[str, Any], whole: dict[str, Any], num_episodes: int, span: int, shift: float) -> dict[str, Any]:
    """The row of one turn; `span`: the most that one episode of it can cost, `shift`: the budget of earlier turns."""
    budget, total = _budget(turn), _budget(whole)
    low, high = visited_interval(turn["tv"] * num_episodes)
    variance = max(turn["square"] - num_episodes * budget**2, 0) / max(num_episodes - 1, 1)
    margin = bernstein_margin(variance, num_episodes, span)
    return {
        "turn": str(turn["turn"]),
        "n": turn["n"],
        "tv": turn["tv"],
        "off_support": turn["off_support"],
        "budget": budget,
        "share": budget / total if total else float("nan"),
        "low": low / num_episodes + turn["off_support"],
        "high": high / num_episodes + turn["off_support"],
        "mean_low": max(budget - margin, 0.0),
        "mean_high": budget + margin,
        "state_shift": shift,
        "ratio_drift": turn["ratio_drift"],
        "gspo_gap": turn["gspo_gap"],
    }


def _budget(turn: dict[str, Any]) -> float:
    return float(turn["tv"] + turn["off_support"])


def bound_summary(run: RecordedRun, first_step: int = 0) -> pl.DataFrame:
    """`bound_by_turn` in a form that fits a terminal: four decimals, without n, tv and mean_low."""
    return bound_by_turn(run, first_step).drop("n", "tv", "mean_low").with_columns(pl.col(pl.Float64).round(4) + 0.0)


def bound_over_time(run: RecordedRun) -> pl.DataFrame:
    """The share of the budget by step and turn: columns step, turn (int), budget, as in `bound_by_turn`.

    A turn not reached has no row, nor has a step that was not audited, or whose mass off the kept sets was not computed
    while that of others was.
    """
    mismatch = run.mismatch()
    if "tv" not in mismatch.columns:
        return pl.DataFrame(schema={"step": pl.Int64, "turn": pl.Int64, "budget": pl.Float64})
    rows = _audited_rows(run, mismatch)
    of_all = pl.col("turn") == _ALL
    episodes = rows.filter(of_all).group_by("step").agg(pl.col("num_episodes").sum().alias("of_step"))
    budget = (pl.col("tv") + pl.col("off_support").fill_null(0)) * pl.col("num_episodes")
    turns = rows.filter(~of_all).group_by("step", "turn").agg(budget.sum().alias("budget")).join(episodes, on="step")
    return turns.select("step", "turn", pl.col("budget") / pl.col("of_step")).sort("step", "turn")


def _audited_rows(run: RecordedRun, mismatch: pl.DataFrame) -> pl.DataFrame:
    """The rows that carry the whole audit, of updates that used their episodes first; `turn` is -1 for all turns.

    Where some have the mass off the kept sets, the others were recorded between its computations: it is not 0 there but
    unknown, and a mean over both would be too small. With full support none has it.
    """
    rows = mismatch.filter(
        pl.col("part") == "total", pl.col("scope").is_in(["turn", "all"]), pl.col("tv").is_not_null()
    )
    if "update" in rows.columns:
        num_minibatches = (run.config.get("trainer") or {}).get("num_minibatches", 1)
        rows = rows.filter(pl.col("update").fill_null(0) < num_minibatches)
    computed = rows["off_support"].is_not_null()
    return rows.filter(computed) if computed.any() else rows


def _audited(run: RecordedRun, first_step: int) -> tuple[pl.DataFrame, int]:
    """(the run's rows that carry the audit; how many episodes their steps had)."""
    every = run.mismatch()
    if "tv" not in every.columns:
        raise ValueError(f"{run.path} was recorded before the bound was audited; its other tables are as they were")
    rows = _audited_rows(run, every.filter(pl.col("step") >= first_step))
    if rows.is_empty():
        raise ValueError(f"{run.path} has no audited step from step {first_step} on")
    return rows, int(rows.filter(pl.col("turn") == _ALL)["num_episodes"].sum())


def _spans(run: Path, width: int) -> tuple[int, int]:
    """The most that a turn and that an episode can cost: their largest number of tokens, `width` each."""
    rollout = read_yaml(run / "config.yaml")["rollout"]
    return rollout["max_turn_tokens"] * width, rollout["max_episode_tokens"] * width
