"""The improvement bound's estimate against the truth: exact total variation at every state of a recorded batch."""

from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import load_file
from torch import Tensor

from agent_rl.objective.intervals import visited_interval
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.pipeline.run_directory import checkpoint_step, list_checkpoints, load_run_config
from agent_rl.recorded_batch import RecordedBatch
from agent_rl.trainer.model import copy_weights, load_model, weights_of
from agent_rl.trainer.total_variation import total_variation


def audit_bound(run: Path, step: int) -> pl.DataFrame:
    """The total variation between rollouts and policy on batch `step` of a run, exact and estimated, by turn.

    The policy pi has the weights that step `step` trained from. One row a turn and one for all ("all", last). Every
    figure is a mean over episodes of a sum over tokens. Columns: turn; n, tokens; exact, the sum of D(mu, pi) over the
    kept set, with mu recomputed by the trainer at the version that sampled each token; sampled, the sum of (1 - r)+
    from the recorded behaviour log-probs, whose expectation is `exact`; low and high, limits on `exact` that follow
    from `sampled`, each wrong with probability 0.05; off_support, the mass off the kept set, NaN with full support.
    Raises `ValueError` where the batch, its checkpoint or the weights of a version are not there.
    """
    recorded = RecordedBatch(run, step, load_run_config(run))
    policy = recorded.policy(recorded.recorded_routing)
    batches = recorded.packed(recorded.trajectories)
    exact = _exact(run, recorded, batches)
    log_ratios = [
        (lp - batch.behavior_logprobs)[batch.active.index] for lp, batch in zip(policy.logprobs, batches, strict=True)
    ]
    columns = {
        "exact": torch.cat(exact).double(),
        "sampled": (-torch.expm1(torch.cat(log_ratios).double())).clamp(min=0),
        "off_support": torch.cat(
            policy.off_support or [torch.full_like(recorded.turn_ids, torch.nan, dtype=torch.float64)]
        ),
    }
    return _by_turn(recorded.turn_ids, columns, len(recorded.trajectories))


def _exact(run: Path, recorded: RecordedBatch, batches: list[TokenBatch]) -> list[Tensor]:
    """D(mu, pi) at each sampled token, [A] a batch. Each version that sampled tokens takes one pass."""
    behavior = load_model(str(recorded.checkpoint), recorded.config.trainer.compute).requires_grad_(False)
    exact = [torch.zeros(len(batch.active)) for batch in batches]
    versions = [batch.policy_versions[batch.active.index] for batch in batches]
    for version in sorted(set(torch.cat(versions).tolist())):
        copy_weights(_weights(run, recorded, version), behavior)
        for values, batch, own in zip(exact, batches, versions, strict=True):
            if bool((own == version).any()):
                values[own == version] = total_variation(behavior, recorded.model, batch)[own == version]
    return exact


def _weights(run: Path, recorded: RecordedBatch, version: int) -> dict[str, Any]:
    """The weights of a policy version: a snapshot in the checkpoint, or a checkpoint of that step."""
    snapshot = recorded.checkpoint / "snapshots" / f"{version}.safetensors"
    if snapshot.is_file():
        return dict(load_file(snapshot))
    for checkpoint in list_checkpoints(run):
        if checkpoint_step(checkpoint) * recorded.config.updates_per_batch == version:
            # Through the model: a checkpoint names each expert's weights, a snapshot the model's fused ones.
            return weights_of(load_model(str(checkpoint), recorded.config.trainer.compute))
    raise ValueError(
        f"the weights of policy version {version} are in no snapshot and no checkpoint of {run}; "
        "train with trainer.proximal.every=1, which keeps them"
    )


def _by_turn(turn_ids: Tensor, columns: dict[str, Tensor], num_episodes: int) -> pl.DataFrame:
    rows = []
    for turn in [*range(int(turn_ids.max()) + 1), None]:
        chosen = torch.ones_like(turn_ids, dtype=torch.bool) if turn is None else turn_ids == turn
        sums = {name: float(values[chosen].sum()) for name, values in columns.items()}
        low, high = visited_interval(sums["sampled"])
        limits = {"low": low / num_episodes, "high": high / num_episodes}
        means = {name: value / num_episodes for name, value in sums.items()}
        rows.append({"turn": "all" if turn is None else str(turn), "n": int(chosen.sum()), **means, **limits})
    return pl.DataFrame(rows).select("turn", "n", "exact", "sampled", "low", "high", "off_support")
