"""The mismatch rows of a step: the total, and its two parts where proximal log-probs are known."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agent_rl.objective.bound import bound_table
from agent_rl.objective.diagnostics import StepTokens, mismatch_table
from agent_rl.objective.loss import LossOutput, StepContext
from agent_rl.objective.metrics import turn_rows
from agent_rl.objective.quantile import Reduce
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.records import FloatArray
from agent_rl.trainer.packing import is_dummy
from agent_rl.trainer.token_logprobs import TokenLogprobs


def step_tokens(
    batches: Sequence[TokenBatch],
    logprobs: Sequence[Tensor],
    entropies: Sequence[Tensor],
    outputs: Sequence[LossOutput],
    policy_version: int,
) -> StepTokens:
    """The active tokens of a step."""

    def gather(columns: Sequence[Tensor]) -> Tensor:
        return torch.cat([column[b.active.index] for column, b in zip(columns, batches, strict=True)])

    return StepTokens(
        logprobs=gather(logprobs),
        behavior_logprobs=gather([b.behavior_logprobs for b in batches]),
        turn_ids=gather([b.turn_ids for b in batches]),
        num_turns=gather([_num_turns(b) for b in batches]),
        entropy=gather(entropies),
        gate=gather([o.gate for o in outputs]),
        clipped=gather([o.clipped for o in outputs]),
        kept_sizes=torch.cat([b.active.kept_sizes for b in batches]),
        lag=policy_version - gather([b.policy_versions for b in batches]),
    )


def join_tokens(parts: Sequence[StepTokens]) -> StepTokens:
    """The tokens of all ranks; they have the same columns."""
    columns: dict[str, Any] = {}
    for name in vars(parts[0]):
        each = [vars(part)[name] for part in parts]
        columns[name] = None if each[0] is None else torch.cat(each)
    return StepTokens(**columns)


def reference_rows(
    batches: Sequence[TokenBatch], outputs: Sequence[LossOutput], step: StepContext, reduce: Reduce | None = None
) -> list[dict[str, Any]]:
    """Rows of mismatch.parquet with `part` reference: what a turn-conditioned clip compared each turn with."""
    rows = [dict(row) for row in turn_rows(batches, outputs, step, reduce)]
    nowhere = {"part": "reference", "scope": "turn", "lag": -1, "num_turns": -1}
    return [{**nowhere, "turn": row.pop("bucket"), **row, "fallback": float(row["fallback"])} for row in rows]


class BoundTokens(NamedTuple):
    """Input of the bound's audit for n sampled tokens: log_ratio float [n], turn_ids and episodes int64 [n], the
    latter from 0 to num_episodes - 1, off_support float [n] or None where no kept set is recorded."""

    log_ratio: Tensor
    turn_ids: Tensor
    episodes: Tensor
    num_episodes: int
    off_support: Tensor | None


def bound_tokens(batches: Sequence[TokenBatch], found: Sequence[TokenLogprobs]) -> BoundTokens:
    """The `BoundTokens` of a rank; a dummy does not count as an episode."""
    counts = [0 if is_dummy(b) else len(b.cu_seqlens) - 1 for b in batches]
    first = [sum(counts[:i]) for i in range(len(counts))]
    off_support = [
        torch.zeros(len(b)) if f.off_support is None else f.off_support for b, f in zip(batches, found, strict=True)
    ]
    recorded = any(f.off_support is not None for f in found)
    return BoundTokens(
        torch.cat([(f.logprobs - b.behavior_logprobs)[b.active.index] for b, f in zip(batches, found, strict=True)]),
        torch.cat([b.active.turn_ids for b in batches]),
        torch.cat([b.active.sequence + offset for b, offset in zip(batches, first, strict=True)]),
        sum(counts),
        torch.cat([k[b.active.index] for b, k in zip(batches, off_support, strict=True)]) if recorded else None,
    )


def bound_rows(shares: Sequence[BoundTokens]) -> list[dict[str, Any]]:
    """The audit of the improvement bound over all episodes of a step, as `objective.bound.bound_table` has it."""
    first = [sum(share.num_episodes for share in shares[:i]) for i in range(len(shares))]
    off_support = [torch.zeros_like(s.log_ratio) if s.off_support is None else s.off_support for s in shares]
    return bound_table(
        torch.cat([share.log_ratio for share in shares]),
        torch.cat([share.turn_ids for share in shares]),
        torch.cat([share.episodes + offset for share, offset in zip(shares, first, strict=True)]),
        sum(share.num_episodes for share in shares),
        torch.cat(off_support) if any(share.off_support is not None for share in shares) else None,
    )


def with_bound(rows: Sequence[dict[str, Any]], bound: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of mismatch.parquet with the audit's columns on those of part total, scope turn or all."""
    columns = {row["turn"]: {name: value for name, value in row.items() if name != "turn"} for row in bound}
    audited = {("total", "turn"), ("total", "all")}
    return [row | columns[row["turn"]] if (row["part"], row["scope"]) in audited else row for row in rows]


def _num_turns(batch: TokenBatch) -> Tensor:
    """Turns of the trajectory that each token belongs to, int64 [T]."""
    last = torch.full((len(batch.cu_seqlens) - 1,), -1).scatter_reduce(0, batch.segment_ids, batch.turn_ids, "amax")
    return last[batch.segment_ids] + 1


def mismatch_rows(tokens: StepTokens, proximal_logprobs: Tensor | None) -> list[dict[str, Any]]:
    """Rows of mismatch.parquet. `proximal_logprobs` [n]: NaN on tokens it was not computed for.

    `part` total is d = lp - mu over all tokens. Where the proximal log-prob is known (the trainer's log-prob at the
    weights that the token was sampled with), d is split, over those tokens, into policy_lag = lp - proximal and
    implementation = proximal - mu.
    """
    rows = [{"part": "total", **row} for row in mismatch_table(tokens)]
    if proximal_logprobs is None:
        return rows
    known = torch.isfinite(proximal_logprobs)
    chosen = replace(tokens.select(known), gate=None, clipped=None, entropy=None, kept_sizes=None)
    proximal = proximal_logprobs[known]
    parts = {
        "policy_lag": replace(chosen, behavior_logprobs=proximal),
        "implementation": replace(chosen, logprobs=proximal),
    }
    return rows + [
        {"part": name, **row} for name, part in parts.items() if len(proximal) for row in mismatch_table(part)
    ]


class StepShare(NamedTuple):
    """A rank's part of a step: its active tokens, and `proximal_logprobs` [n] of them where they were computed."""

    tokens: StepTokens
    bound: BoundTokens
    proximal_logprobs: Tensor | None


def rows_of_all(shares: Sequence[StepShare]) -> list[dict[str, Any]]:
    """The mismatch rows of the tokens of all ranks, with the audit of the bound."""
    proximal = [share.proximal_logprobs for share in shares if share.proximal_logprobs is not None]
    rows = mismatch_rows(join_tokens([share.tokens for share in shares]), torch.cat(proximal) if proximal else None)
    return with_bound(rows, bound_rows([share.bound for share in shares]))


def active_values(
    plan: Sequence[Sequence[int]], batches: Sequence[TokenBatch], values: Sequence[FloatArray | None] | None
) -> Tensor | None:
    """Per-trajectory values at the active tokens of the step, in micro-batch order; NaN where there is none."""
    if values is None:
        return None
    found = [torch.empty(0)]  # a rank may have dummies only
    for part, batch in zip(plan, batches, strict=True):
        if not part:
            continue
        lengths = batch.cu_seqlens.diff().tolist()
        rows = [values[i] for i in part]
        whole = [np.full(n, np.nan, np.float32) if r is None else r for r, n in zip(rows, lengths, strict=True)]
        found.append(torch.from_numpy(np.concatenate(whole))[batch.active.index])
    return torch.cat(found)
