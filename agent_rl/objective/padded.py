"""The public entry over padded [B, T] arrays: packs them and calls the same composer that training does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.errors import ObjectiveError
from agent_rl.objective.loss import Objective
from agent_rl.objective.methods import method
from agent_rl.objective.metrics import step_metrics
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.settings import check


@dataclass(frozen=True, eq=False)
class ObjectiveValues:
    """What an objective makes of one batch. loss: float; grad_logprobs = d loss / d logprobs and the rest: [B, T].

    objective: weight times S per token; weight: the product of the gates; log_ratio: lp - mu; ratio: what is
    clipped, at the configured level and denominator; eps_low, eps_high: the radii; gate, clipped, newly_clipped:
    bool; factor: min(c_low, c_high); kl; q: the quantile each token was compared with, None for a clip without one.
    All are 0 or False outside the loss mask. metrics: the scalars that training logs.
    """

    loss: float
    grad_logprobs: Tensor
    objective: Tensor
    weight: Tensor
    log_ratio: Tensor
    ratio: Tensor
    eps_low: Tensor
    eps_high: Tensor
    factor: Tensor
    gate: Tensor
    clipped: Tensor
    newly_clipped: Tensor
    kl: Tensor
    q: Tensor | None
    metrics: dict[str, float]


_PER_TOKEN = ("objective", "weight", "log_ratio", "ratio", "eps_low", "eps_high", "factor", "gate", "clipped",
              "newly_clipped", "kl")  # fmt: skip


def evaluate(
    objective: ObjectiveConfig | Mapping[str, Any] | str,
    *,
    logprobs: Any,
    behavior_logprobs: Any,
    proximal_logprobs: Any = None,
    ref_logprobs: Any = None,
    advantages: Any,
    loss_mask: Any,
    turn_ids: Any = None,
    kept_set_sizes: Any = None,
) -> ObjectiveValues:
    """Loss, gradient and per-token quantities of `objective` on one batch of B responses of T columns.

    `objective`: a config, a mapping of its keys, or the name of a method in configs/methods.
    Every argument is a [B, T] array, nested list or tensor; floats are computed in the dtype of `logprobs`.
    Columns where `loss_mask` is 0 are never read. `kept_set_sizes`: number of tokens the sampler kept, 0 for the
    full vocabulary. Raises `ObjectiveError` with a `code`: shape_mismatch, nonfinite, positive_logp,
    empty_active_set, missing_ref, missing_mut, missing_turn, bad_method; an unknown key of `objective`, or parts
    that mean nothing together, are a `ValueError` that says what to do.
    """
    config = _config(objective)
    values = torch.as_tensor(logprobs).detach()
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    given = {"behavior_logprobs": behavior_logprobs, "advantages": advantages}
    given |= {"proximal_logprobs": proximal_logprobs, "ref_logprobs": ref_logprobs}
    floats = {name: _like(values, name, array, values.dtype) for name, array in given.items() if array is not None}
    mask = _like(values, "loss_mask", loss_mask, torch.bool)
    turns = torch.full_like(mask, -1, dtype=torch.int64)
    if turn_ids is not None:
        turns = _like(values, "turn_ids", turn_ids, torch.int64)
    sizes = None if kept_set_sizes is None else _like(values, "kept_set_sizes", kept_set_sizes, torch.int64)
    runnable = Objective(config)
    if turn_ids is None and runnable.needs_turns:
        raise ObjectiveError("missing_turn", "this objective looks at turns; pass turn_ids")
    return _run(runnable, values, _pack(mask, turns, sizes, floats))


def _config(objective: ObjectiveConfig | Mapping[str, Any] | str) -> ObjectiveConfig:
    if isinstance(objective, str):
        return method(objective)
    return objective if isinstance(objective, ObjectiveConfig) else check(ObjectiveConfig, objective, "objective")


def _like(values: Tensor, name: str, array: Any, dtype: torch.dtype) -> Tensor:
    """`array` as a tensor next to `values`, of its shape [B, T]."""
    tensor = torch.as_tensor(array).detach().to(values.device, dtype)
    if values.dim() != 2 or tensor.shape != values.shape:
        message = f"{name} has shape {tuple(tensor.shape)}, logprobs {tuple(values.shape)}; both must be [B, T]"
        raise ObjectiveError("shape_mismatch", message)
    return tensor


def _pack(mask: Tensor, turns: Tensor, sizes: Tensor | None, floats: dict[str, Tensor]) -> TokenBatch:
    """Rows one after the other, one segment each; what the objective does not read is filled with zeros."""
    rows, columns = mask.shape
    zeros = torch.zeros(rows * columns, dtype=torch.int64, device=mask.device)
    row = torch.arange(rows, device=mask.device).repeat_interleave(columns)
    kept = {}
    if sizes is not None:
        counts = sizes[mask]
        offsets = kept["kept_offsets"] = torch.cat([zeros[:1], counts.cumsum(0)])
        position = torch.arange(int(offsets[-1]), device=mask.device)
        kept["kept_ids"] = position - offsets[:-1].repeat_interleave(counts)  # 0 and up, in each row
    return TokenBatch(
        token_ids=zeros,
        position_ids=torch.arange(columns, device=mask.device).repeat(rows),
        segment_ids=row,
        trajectory_ids=row,
        loss_mask=mask.flatten(),
        turn_ids=turns.flatten(),
        policy_versions=zeros,
        temperature=torch.ones_like(floats["advantages"].flatten()),
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=mask.device) * columns,
        **{name: tensor.flatten() for name, tensor in floats.items()},
        **kept,
    )


def _run(objective: Objective, logprobs: Tensor, batch: TokenBatch) -> ObjectiveValues:
    flat = logprobs.flatten().clone().requires_grad_()
    step = objective.begin_step([batch], [flat])
    output = objective.loss(flat, batch, step)
    (gradient,) = torch.autograd.grad(output.loss, flat)
    shape = logprobs.shape
    per_token: dict[str, Any] = {name: getattr(output, name).reshape(shape) for name in _PER_TOKEN}
    return ObjectiveValues(
        loss=float(output.loss.detach()),
        grad_logprobs=gradient.reshape(shape),
        q=None if output.q is None else output.q.reshape(shape),
        metrics=step_metrics([batch], [output], step=step),
        **per_token,
    )
