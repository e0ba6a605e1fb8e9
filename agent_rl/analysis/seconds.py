"""Where each second of a step went, per rollout worker and for the trainer. Reads files only."""

from typing import Any

import polars as pl

PREFIX = "seconds/"
STATES = ("generate", "tool", "score", "train", "push", "queue", "idle")


def seconds_table(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """One row a worker, `trainer` last: its mean seconds a step by state, and `step`, their sum: the step's wall time.

    `rows` are lines of metrics.jsonl. A worker's seconds go to the first of these that holds: push (it loads weights),
    generate (some episode is being sampled), tool, score, queue (episodes wait for a slot or for their wave), idle.
    The trainer's queue is its wait for rollouts; its idle is what is left: evaluation, recording.
    """
    by_who: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(PREFIX) and value is not None:
                who, state = key.removeprefix(PREFIX).split("/")
                by_who.setdefault(who, {}).setdefault(state, []).append(value)
    means = [
        {"who": who, "steps": max(map(len, states.values()))}
        | {state: sum(states[state]) / len(states[state]) for state in STATES if state in states}
        for who, states in sorted(by_who.items(), key=lambda pair: (pair[0] == "trainer", pair[0]))
    ]
    table = pl.DataFrame(means, infer_schema_length=None)
    present = [state for state in STATES if state in table.columns]
    return table.select("who", "steps", *present, pl.sum_horizontal(present).alias("step")) if means else table
