"""A bounded sample of a run's episodes, token by token, for the episode viewer. Reads files only.

What is looked at is bounded too: the whole of up to `_STEPS` optimizer steps, so that a long run costs no more than
a short one.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from agent_rl.analysis.clip_states import clip_states
from agent_rl.analysis.recorded import PartTable, RecordedRun, read_columns
from agent_rl.analysis.token_text import TokenTexts
from agent_rl.facts import TRAINING_TABLE

_STEPS = 16
"""Optimizer steps whose batches are looked at: the one with the largest mean |d|, the others evenly spaced."""
_A_STEP = 3
"""Episodes taken for being of a step, all of one group; the others are those with the largest |d| of a token."""
_A_GROUP = 2
"""Of the latter, episodes of one group."""

Row = dict[str, Any]
Array = npt.NDArray[Any]


@dataclass
class Sample:
    """Episodes as the page reads them, how many there are in all, and what to say of the choice."""

    episodes: list[Row]
    texts: list[tuple[int, str]]
    """(token id, text) of each different token; the episodes' `tok` are indices into it."""
    num_recorded: int
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> Row:
        return {
            "episodes": self.episodes,
            "texts": self.texts,
            "num_recorded": self.num_recorded,
            "notes": self.notes,
        }


def sample(run: RecordedRun, most: int = 48, most_tokens: int = 150_000) -> Sample:
    """Up to `most` episodes of at most `most_tokens` tokens together, ordered by step and episode.

    The choice is the same for the same files. For each step that is looked at: the group whose rewards differ most,
    of it the best and the worst rewarded episode and the one with most turns. A third of `most` goes to the episodes
    with the largest |d| of any token, and each stop reason is shown if it occurs. Episodes too long for the tokens
    that are left are passed over.
    """
    index = _Index(run)
    steps = _steps(run, index)
    seen = [row for step in steps for row in index.read(step)]
    chosen = _within(most_tokens, _choose(seen, most), most)
    texts = TokenTexts(run.config)
    episodes = [_episode(row, texts) for row in sorted(chosen, key=lambda row: (row["step"], row["episode_id"]))]
    notes = [f"from {len(steps)} of {len(index.steps)} steps", *texts.notes]
    unknown = sorted({row["clip_note"] for row in chosen if row["clip_note"]})
    return Sample(episodes, texts.table, index.num_episodes, notes + unknown)


class _Index:
    """Finds the rollout facts of a training step: episodes are trained at the step of their batch, or elsewhere."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        parts = PartTable(run.path / TRAINING_TABLE).paths()
        self.steps = {int(path.stem.removeprefix("part-")): path for path in parts}
        self.rollouts = run.rollout_parts.paths()
        self.num_episodes = run.rollouts().height

    def read(self, step: int) -> list[Row]:
        """The step's trained episodes, each one row of both facts, with its clip states."""
        try:
            training = read_columns(self.steps[step], None).filter(pl.col("fate") == "trained")
            rollouts = self._rollouts(set(training["episode_id"].to_list()), step)
        except (OSError, pl.exceptions.PolarsError):
            return []
        if rollouts.is_empty():
            return []
        joined = training.join(rollouts.drop("group_id"), on="episode_id").sort("order")
        rows = [_arrays(row) for row in joined.to_dicts()]
        states, note = clip_states(self.run, step, rows) if len(rows) == training.height else (None, "")
        for position, row in enumerate(rows):
            row["states"], row["clip_note"] = states[position] if states else None, note
        return rows

    def _rollouts(self, wanted: set[int], step: int) -> pl.DataFrame:
        """The rollout facts of the `wanted` episodes: lock-step regimes have them in the part of the step's number."""
        parts: list[pl.DataFrame] = []
        likely = [path for path in self.rollouts if path.stem.endswith(f"-{step:06d}")]
        for path in [*likely, *(path for path in reversed(self.rollouts) if path not in likely)]:
            if not wanted:
                break
            if path in likely or wanted & set(read_columns(path, ["episode_id"])["episode_id"].to_list()):
                part = read_columns(path, None).filter(pl.col("episode_id").is_in(list(wanted)))
                wanted = wanted - set(part["episode_id"].to_list())
                parts.append(part)
        return pl.concat(parts, how="diagonal_relaxed") if parts else pl.DataFrame()


def _steps(run: RecordedRun, index: _Index) -> list[int]:
    """Which steps to look at, in order."""
    known = sorted(index.steps)
    if len(known) <= _STEPS:
        return known
    even = {known[round(place)] for place in np.linspace(0, len(known) - 1, _STEPS - 1)}
    table = run.mismatch().filter(pl.col("part") == "total", pl.col("scope") == "all", pl.col("step").is_in(known))
    worst = table.sort("mean_abs_d", "step", descending=[True, False], nulls_last=True)["step"].to_list()
    return sorted(even | set(worst[:1]))


_PER_TOKEN = ("token_ids", "loss_mask", "behavior_logprobs", "turn_ids", "policy_versions", "logprobs", "entropy")


def _arrays(row: Row) -> Row:
    """The row with its lists as arrays, with |d| and kept-set sizes [L], NaN and -1 where nothing was sampled."""
    row |= {name: np.asarray(row[name]) for name in _PER_TOKEN}
    for name in ("proximal_logprobs", "ref_logprobs"):
        row[name] = None if row.get(name) is None else np.asarray(row[name])
    row["d"] = row["logprobs"].astype(np.float64) - row["behavior_logprobs"]
    row["kept"] = np.full(len(row["token_ids"]), -1)
    row["kept"][row["loss_mask"]] = np.diff(row["kept_offsets"])
    row["worst"] = float(np.max(np.abs(row["d"][row["loss_mask"]]), initial=0.0))
    return row


def _choose(seen: list[Row], most: int) -> list[Row]:
    """Rows in order of preference, each once; see `sample`."""
    ordered: dict[int, Row] = {}

    def take(rows: Sequence[Row]) -> None:
        ordered.update({row["episode_id"]: row for row in rows if row["episode_id"] not in ordered})

    for _, rows in groupby(sorted(seen, key=lambda row: str(row["stop_reason"])), lambda row: row["stop_reason"]):
        take(list(rows)[:1])
    worst = _spread(sorted(seen, key=lambda row: (-row["worst"], row["episode_id"])))
    take(worst[: most // 3])
    by_step = [list(rows) for _, rows in groupby(seen, key=lambda row: row["step"])]
    picks = [_of_one_step(rows) for rows in by_step]
    for place in range(_A_STEP):  # one a step first, so that a small sample still spans the training
        take([pick[place] for pick in picks if len(pick) > place])
    take(worst)
    return list(ordered.values())


def _spread(rows: list[Row]) -> list[Row]:
    """At most `_A_GROUP` of a group: its episodes tend to share their worst token."""
    taken = Counter[int]()
    spread = []
    for row in rows:
        taken[row["group_id"]] += 1
        if taken[row["group_id"]] <= _A_GROUP:
            spread.append(row)
    return spread


def _of_one_step(rows: list[Row]) -> list[Row]:
    """Best, worst and longest episode of the group whose rewards differ most; ties go to the lowest ids."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    rewards = {group: [row["reward"] for row in members] for group, members in groups.items()}
    group = min(groups, key=lambda group: (min(rewards[group]) - max(rewards[group]), group))
    members = sorted(groups[group], key=lambda row: (-row["reward"], row["episode_id"]))
    picks = [members[0], members[-1], *sorted(members, key=lambda row: (-row["num_turns"], row["episode_id"]))]
    return list({row["episode_id"]: row for row in picks}.values())[:_A_STEP]


def _within(most_tokens: int, rows: list[Row], most: int) -> list[Row]:
    chosen: list[Row] = []
    for row in rows:
        if len(chosen) < most and len(row["token_ids"]) <= most_tokens:
            most_tokens -= len(row["token_ids"])
            chosen.append(row)
    return chosen


def _episode(row: Row, texts: TokenTexts) -> Row:
    """One episode for the page; numbers are short, since there are many."""
    return {
        "step": row["step"],
        "batch": row["batch"],
        "id": row["episode_id"],
        "group": row["group_id"],
        "attempt": row["attempt"],
        "reward": row["reward"],
        "parts": json.loads(row["reward_parts"] or "{}"),
        "advantage": _short(row["advantage"]),
        "stop": row["stop_reason"],
        "answer": row["answer"],
        "messages": json.loads(row["messages"] or "[]"),
        "tags": json.loads(row["tags"] or "{}"),
        "sampling": {name: row[name] for name in ("temperature", "top_p", "top_k")},
        "num_turns": row["num_turns"],
        "mean_abs_d": _short(float(np.abs(row["d"][row["loss_mask"]]).mean()) if row["loss_mask"].any() else None),
        "max_abs_d": _short(row["worst"]),
        "turns": [_turn(turn) for turn in row["turns"] or []],
        "segments": _segments(row, texts),
    }


def _turn(turn: Row) -> Row:
    calls = [{"name": name, "arguments": arguments, "error": error} for name, arguments, error in _calls(turn)]
    times = {name: _short(turn[name]) for name in ("generate_s", "tool_s")}
    return {"turn": turn["turn_id"], "calls": calls, "results": turn["tool_results"] or [], **times}


def _calls(turn: Row) -> list[list[Any]]:
    return list(json.loads(turn["tool_calls"] or "[]"))


def _segments(row: Row, texts: TokenTexts) -> list[Row]:
    """Runs of tokens of one turn that were all sampled or all given, with the columns that apply."""
    mask, turns = row["loss_mask"], row["turn_ids"]
    edges = np.flatnonzero((np.diff(turns) != 0) | (np.diff(mask) != 0)) + 1
    segments = []
    for part in np.split(np.arange(len(mask)), edges):
        if len(part):
            segment: Row = {"turn": int(turns[part[0]]), "sampled": bool(mask[part[0]])}
            segment["tok"] = texts.indices(row["token_ids"][part].tolist())
            segments.append(segment | (_columns(row, part) if segment["sampled"] else {}))
    return segments


def _columns(row: Row, part: Array) -> Row:
    columns: Row = {name: _rounded(row[source][part]) for name, source in _SHORT_NAMES.items()}
    if row["proximal_logprobs"] is not None:
        columns["prox"] = _rounded(row["proximal_logprobs"][part])
    columns["ver"] = row["policy_versions"][part].tolist()
    if (row["kept"][part] > 0).any():
        columns["kept"] = row["kept"][part].tolist()
    if row["states"] is not None:
        columns["state"] = row["states"][part].tolist()
    return columns


_SHORT_NAMES = {"lp": "logprobs", "mu": "behavior_logprobs", "d": "d", "ent": "entropy"}


def _rounded(values: Array) -> list[float | None]:
    """Four digits, wherever the point is: a |d| of 1e-7 at lag 0 still shows."""
    return [_short(float(value)) for value in values]


def _short(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.4g}")
