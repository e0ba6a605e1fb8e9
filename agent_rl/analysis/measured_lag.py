"""What a run measured of the figures that mean lag follows from, and of mean lag itself. Reads files only."""

from dataclasses import dataclass

import polars as pl

from agent_rl.analysis.recorded import PartTable, RecordedRun
from agent_rl.facts import ROLLOUT_TABLE, TRAINING_TABLE

_TRAINING_COLUMNS = ("step", "group_id", "episode_id", "fate", "trained_at")
_ROLLOUT_COLUMNS = ("group_id", "episode_id", "num_sampled", "min_policy_version", "max_policy_version", "turns")


@dataclass(frozen=True)
class MeasuredLag:
    """Means over steps and responses. Lag is in policy versions, as `MeanLag` counts it: from a response's first token
    (`pre_queue`) to the last token of its group, and from there (`in_queue`) to its training.

    `tail`: mean sampled tokens of a group's longest response over those of all responses. `response_s`: seconds that a
    response takes, tools included. `train_s`: seconds that the trainer is busy with a step, publishing included.
    `batch`: responses a step. `token_lag`: mean over trained tokens, below the sum where weights change in flight.
    """

    tail: float
    response_s: float
    train_s: float
    batch: float
    pre_queue: float
    in_queue: float
    token_lag: float

    def rho(self, concurrency: float) -> float:
        """Responses a second of so many at once, over those that the trainer could train on."""
        return (concurrency / self.response_s) / (self.batch / self.train_s)


def measured_lag(run: RecordedRun, first_step: int = 0) -> MeasuredLag:
    """Over the steps from `first_step` on. Raises `ValueError` if the run has trained on nothing since."""
    rows = [row for row in run.metrics() if row["step"] >= first_step and row.get("train_s") is not None]
    trained = PartTable(run.path / TRAINING_TABLE, _TRAINING_COLUMNS).read()
    rollouts = PartTable(run.path / ROLLOUT_TABLE, _ROLLOUT_COLUMNS).read()
    if not rows or trained.is_empty() or rollouts.is_empty():
        raise ValueError(
            f"{run.path} has no trained step from step {first_step} on; wait for one or lower --first-step"
        )
    absent = {*_TRAINING_COLUMNS} - {*trained.columns} | {*_ROLLOUT_COLUMNS} - {*rollouts.columns}
    if absent:
        raise ValueError(
            f"{run.path} has no {', '.join(sorted(absent))} in its facts: it was recorded by another version of "
            "agent-rl; read it with that one"
        )
    trained = trained.filter(pl.col("step") >= first_step, pl.col("fate") == "trained")
    joined = trained.join(rollouts, on=["group_id", "episode_id"]).filter(pl.col("num_sampled") > 0)
    group = ("step", "group_id")
    seconds = pl.col("turns").list.eval(pl.element().struct.field("generate_s") + pl.element().struct.field("tool_s"))
    groups = joined.group_by(group).agg(
        pl.col("num_sampled").max().alias("longest"), pl.col("max_policy_version").max().alias("ended")
    )
    lags = joined.join(groups, on=group).select(
        (pl.col("ended") - pl.col("min_policy_version")).mean().alias("pre_queue"),
        (pl.col("trained_at").list.first() - pl.col("ended")).mean().alias("in_queue"),
        pl.col("num_sampled").mean().alias("length"),
        seconds.list.sum().mean().alias("response_s"),
    )
    pre_queue, in_queue, length, response_s = lags.row(0)
    busy = [row["train_s"] + row.get("publish_s", 0.0) for row in rows]
    token_lags = [(row["lag_mean"], row["trained_tokens"]) for row in rows if row.get("lag_mean") is not None]
    return MeasuredLag(
        tail=float(groups["longest"].mean() or 0.0) / length,  # type: ignore[arg-type]
        response_s=response_s,
        train_s=sum(busy) / len(busy),
        batch=joined.height / len(rows),
        pre_queue=pre_queue,
        in_queue=in_queue,
        token_lag=sum(lag * number for lag, number in token_lags) / max(sum(number for _, number in token_lags), 1),
    )
