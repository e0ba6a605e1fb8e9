"""The Parquet tables of a run: their schemas, and records to rows and back.

A table is a folder of part files, one an optimizer step or rollout batch, each written whole and then
renamed: a reader never sees half a part, and resuming a run deletes parts instead of rewriting a file.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from agent_rl.records import Episode, Prompt, SamplingMask, SamplingParams, ShortArray, StopReason, Trajectory

ROLLOUT_TABLE = "rollout_facts.parquet"
TRAINING_TABLE = "training_facts.parquet"
MISMATCH_TABLE = "mismatch.parquet"
EVALUATION_TABLE = "evaluations.parquet"

_TOOL_TURN = pa.struct(
    [
        ("turn_id", pa.int32()),
        ("tool_calls", pa.string()),
        ("tool_results", pa.list_(pa.string())),
        ("generate_s", pa.float64()),
        ("tool_s", pa.float64()),
    ]
)

ROLLOUT_FACTS = pa.schema(
    [
        ("batch", pa.int32()),
        ("group_id", pa.int64()),
        ("episode_id", pa.int64()),
        ("attempt", pa.int32()),
        ("messages", pa.string()),
        ("answer", pa.string()),
        ("tags", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.string()),
        ("stop_reason", pa.string()),
        ("mask_reason", pa.string()),
        ("num_turns", pa.int32()),
        ("num_tokens", pa.int32()),
        ("num_sampled", pa.int32()),
        ("min_policy_version", pa.int32()),
        ("max_policy_version", pa.int32()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("turns", pa.list_(_TOOL_TURN)),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("turn_ids", pa.list_(pa.int32())),
        ("policy_versions", pa.list_(pa.int32())),
        ("kept_token_ids", pa.list_(pa.int32())),
        ("kept_offsets", pa.list_(pa.int64())),
        ("routed_experts", pa.list_(pa.int16())),
        ("routed_layers", pa.int32()),
        ("routed_k", pa.int32()),
    ]
)

EVALUATION = pa.schema(
    [
        ("policy_version", pa.int32()),
        ("problem", pa.int64()),
        ("sample", pa.int32()),
        ("messages", pa.string()),
        ("answer", pa.string()),
        ("tags", pa.string()),
        ("final_text", pa.string()),
        ("final_answer", pa.string()),
        ("outcome", pa.float64()),
        ("reward", pa.float64()),
        ("reward_parts", pa.string()),
        ("stop_reason", pa.string()),
        ("num_turns", pa.int32()),
        ("num_tokens", pa.int32()),
        ("num_sampled", pa.int32()),
        ("failure", pa.string()),
    ]
)
"""One row for each problem × sample of an evaluation. `policy_version`: optimizer steps that made the sampled
weights, 0 for a model that no run trained and for a server as it is. `problem`: place in the held-out prompts.
`messages`, `tags` and `reward_parts` are JSON. `final_text` is the last turn if the episode ended with an answer,
`final_answer` what the reward read in it. If the infrastructure broke the episode, `failure` says how, and its
score is null.
"""

TRAINING_FACTS = pa.schema(
    [
        ("step", pa.int32()),
        ("episode_id", pa.int64()),
        ("group_id", pa.int64()),
        ("order", pa.int32()),
        ("fate", pa.string()),
        ("reason", pa.string()),
        ("advantage", pa.float64()),
        ("trained_at", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("entropy", pa.list_(pa.float32())),
        ("ref_logprobs", pa.list_(pa.float32())),
        ("proximal_logprobs", pa.list_(pa.float32())),
    ]
)

MISMATCH = pa.schema(
    [
        ("step", pa.int32()),
        ("update", pa.int32()),
        ("part", pa.string()),
        ("scope", pa.string()),
        ("turn", pa.int32()),
        ("num_turns", pa.int32()),
        ("lag", pa.int32()),
        ("kl_bin", pa.int32()),
        ("layer", pa.int32()),
        ("n", pa.int64()),
        *(
            (name, pa.float64())
            for name in (
                "mean_abs_d",
                "var_d",
                "k1",
                "k3",
                "is_dev_frac",
                "mean_abs_dp",
                "pi_tail",
                "mu_tail",
                "both_tail",
                "pearson_logp",
                "pearson_p",
                "ess",
                "entropy",
                "gate_rate",
                "clip_fraction",
                "kept_size",
                "lag_mean",
                "q_bucket",
                "q_hat",
                "q",
                "fallback",
                "num_responses",
                "eps_eff_low",
                "eps_eff_high",
                "routing_differed",
                "num_episodes",
                "tv",
                "off_support",
                "penalty_var",
                "ratio_drift",
                "state_shift",
                "gspo_gap",
            )
        ),
    ]
)


def rollout_row(batch: int, episode: Episode) -> dict[str, Any]:
    """One row of rollout facts."""
    t = episode.trajectory
    versions, routed = t.policy_versions[t.loss_mask], t.routed_experts
    return {
        "batch": batch,
        "group_id": t.group_id,
        "episode_id": t.episode_id,
        "attempt": t.attempt,
        "messages": json.dumps(episode.prompt.messages),
        "answer": episode.prompt.answer,
        "tags": json.dumps(episode.prompt.tags),
        "reward": t.reward,
        "reward_parts": json.dumps(t.reward_parts),
        "stop_reason": t.stop_reason.value,
        "mask_reason": t.mask_reason,
        "num_turns": t.num_turns,
        "num_tokens": len(t),
        "num_sampled": len(versions),
        "min_policy_version": int(versions.min()) if len(versions) else None,
        "max_policy_version": int(versions.max()) if len(versions) else None,
        "temperature": t.sampling_params.temperature,
        "top_p": t.sampling_params.top_p,
        "top_k": t.sampling_params.top_k,
        "turns": [_turn_row(turn) for turn in episode.turns],
        "token_ids": t.token_ids,
        "loss_mask": t.loss_mask,
        "behavior_logprobs": t.behavior_logprobs,
        "turn_ids": t.turn_ids,
        "policy_versions": t.policy_versions,
        "kept_token_ids": t.sampling_mask.token_ids,
        "kept_offsets": t.sampling_mask.offsets,
        "routed_experts": None if routed is None else routed.ravel(),
        "routed_layers": None if routed is None else routed.shape[1],
        "routed_k": None if routed is None else routed.shape[2],
    }


def evaluation_row(policy_version: int, sample: int, episode: Episode) -> dict[str, Any]:
    """One row of an evaluation."""
    t = episode.trajectory
    return {
        "policy_version": policy_version,
        **_problem(episode.prompt, sample),
        "final_text": episode.final_text,
        "final_answer": episode.answer,
        "outcome": t.outcome,
        "reward": t.reward,
        "reward_parts": json.dumps(t.reward_parts),
        "stop_reason": t.stop_reason.value,
        "num_turns": t.num_turns,
        "num_tokens": len(t),
        "num_sampled": int(t.loss_mask.sum()),
    }


def failed_evaluation_row(policy_version: int, sample: int, prompt: Prompt, failure: str) -> dict[str, Any]:
    """One row of an evaluation for an episode that the infrastructure broke."""
    return {"policy_version": policy_version, **_problem(prompt, sample), "failure": failure}


def evaluation_frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """`rows` as a frame with the columns of `EVALUATION`."""
    frame = pl.from_arrow(pa.Table.from_pylist(rows, schema=EVALUATION))
    assert isinstance(frame, pl.DataFrame)
    return frame


def _problem(prompt: Prompt, sample: int) -> dict[str, Any]:
    return {
        "problem": prompt.index,
        "sample": sample,
        "messages": json.dumps(prompt.messages),
        "answer": prompt.answer,
        "tags": json.dumps(prompt.tags),
    }


def _turn_row(turn: Any) -> dict[str, Any]:
    return {
        "turn_id": turn.turn_id,
        "tool_calls": json.dumps([[c.name, c.arguments, c.error] for c in turn.tool_calls]),
        "tool_results": [result.content for result in turn.tool_results],
        "generate_s": turn.generate_s,
        "tool_s": turn.tool_s,
    }


def trajectory(row: dict[str, Any]) -> Trajectory:
    """The trajectory of a row of rollout facts, bit for bit as it was recorded."""
    return Trajectory(
        group_id=row["group_id"],
        episode_id=row["episode_id"],
        attempt=row["attempt"],
        token_ids=np.asarray(row["token_ids"], np.int32),
        loss_mask=np.asarray(row["loss_mask"], np.bool_),
        behavior_logprobs=np.asarray(row["behavior_logprobs"], np.float32),
        turn_ids=np.asarray(row["turn_ids"], np.int32),
        policy_versions=np.asarray(row["policy_versions"], np.int32),
        sampling_mask=SamplingMask(
            np.asarray(row["kept_token_ids"], np.int32), np.asarray(row["kept_offsets"], np.int64)
        ),
        sampling_params=SamplingParams(row["temperature"], row["top_p"], row["top_k"]),
        reward=row["reward"],
        reward_parts=json.loads(row["reward_parts"]),
        stop_reason=StopReason(row["stop_reason"]),
        routed_experts=_routed_experts(row),
        mask_reason=row.get("mask_reason"),
    )


def unmasked_trajectories(rows: Iterable[dict[str, Any]]) -> list[Trajectory]:
    """The trajectories of rows of rollout facts, in order, without the masked ones."""
    return [trajectory(row) for row in rows if row.get("mask_reason") is None]


def _routed_experts(row: dict[str, Any]) -> ShortArray | None:
    """Routed experts from the flat list of [num_tokens, routed_layers, routed_k]; None if none were recorded."""
    flat = row.get("routed_experts")
    if flat is None:
        return None
    return np.asarray(flat, np.int16).reshape(-1, row["routed_layers"], row["routed_k"])


def write_part(table: Path, index: int, rows: Sequence[dict[str, Any]], schema: pa.Schema | None = None) -> None:
    """Write part `index` of a table whole; without a schema it is read off the rows. No rows, no part."""
    write_rows(part_path(table, index), rows, schema)


def write_rows(path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema | None = None) -> None:
    """Write one Parquet file, whole or not at all. No rows, no file."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), temporary, compression="zstd")
    temporary.rename(path)


def part_path(table: Path, index: int) -> Path:
    return table / f"part-{index:06d}.parquet"


def read_part(table: Path, index: int) -> list[dict[str, Any]]:
    """The rows of one part; none if it was never written."""
    return read_rows(part_path(table, index))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of one file; none if it was never written."""
    return pq.read_table(path).to_pylist() if path.is_file() else []


def truncate(table: Path, first: int, keep: Collection[int] = ()) -> None:
    """Delete every part from index `first` on, except those to keep, and what a killed writer left unfinished."""
    for path in table.glob("part-*.tmp"):
        path.unlink()
    for path in table.glob("part-*.parquet"):
        index = int(path.stem.removeprefix("part-"))
        if index >= first and index not in keep:
            path.unlink()
