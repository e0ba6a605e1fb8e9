"""Log-probs straight from hidden states: over recorded kept sets, or over the vocabulary a slice of rows at a time.

With l = hidden · weight[id], a token's log-prob over its kept set K is l_y - logsumexp of l over K. Only the logits of
kept ids are ever computed, so time and memory grow with the sizes of the sets and not with the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the output weights a rank holds: the ids from `first` on; `sum` and `max` are all-reduces over
    the ranks that hold the others. Every rank has the same tokens and the same loss, and calls them equally often."""

    first: int
    sum: Reduce
    max: Reduce

    def local(self, ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """(row of each id in this rank's weights, 0 where it is not there; whether it is there)."""
        own = (ids >= self.first) & (ids < self.first + size)
        return torch.where(own, ids - self.first, 0), own


WHOLE = VocabularyShard(0, lambda tensor: tensor, lambda tensor: tensor)
"""One rank holds the whole vocabulary."""


class SampledTokens(NamedTuple):
    """A tokens that the policy sampled: ids int64 [A], temperature float [A]; with kept sets also kept_ids int64 [K]
    and kept_offsets int64 [A + 1], an empty row for full vocabulary."""

    ids: Tensor
    temperature: Tensor
    kept_ids: Tensor | None = None
    kept_offsets: Tensor | None = None


class HeadLogprobs(NamedTuple):
    """float32 [A] each; only `logprobs` has a gradient. off_support: the mass off the kept set, 0 on rows without."""

    logprobs: Tensor
    entropies: Tensor
    off_support: Tensor | None


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: SampledTokens,
    budget_bytes: int,
    off_support: bool = False,
    shard: VocabularyShard = WHOLE,
) -> HeadLogprobs:
    """What output weights [V, d] make of the hidden states [A, d] that the tokens were sampled from, in float32.

    Temporaries stay near `budget_bytes`, or those of one row. `off_support` asks for the mass off the kept sets, for
    which the whole vocabulary has to be gone through, without gradient; without kept sets it is None.
    """
    hidden = _ShareWithRanks.apply(hidden.float(), shard.sum) / tokens.temperature[:, None]  # type: ignore[no-untyped-call]
    weight = weight.float()
    if tokens.kept_ids is None or tokens.kept_offsets is None:
        logprobs, entropies, _ = _full_support(hidden, weight, tokens.ids, budget_bytes, shard)
        return HeadLogprobs(logprobs, entropies, None)
    sizes = tokens.kept_offsets.diff()
    cut = (sizes > 0).nonzero().squeeze(1)
    pairs = torch.arange(len(cut), device=cut.device).repeat_interleave(sizes[cut])
    kept = _kept_support(hidden[cut], weight, tokens.ids[cut], (pairs, tokens.kept_ids), budget_bytes, shard)
    columns = [torch.zeros_like(tokens.temperature).index_put((cut,), column) for column in kept[:2]]
    mass = _mass_off(kept[2], hidden[cut], weight, tokens.ids[cut], budget_bytes, shard) if off_support else None
    if len(cut) < len(sizes):
        whole = (sizes == 0).nonzero().squeeze(1)
        full = _full_support(hidden[whole], weight, tokens.ids[whole], budget_bytes, shard)
        columns = [column.index_put((whole,), values) for column, values in zip(columns, full[:2], strict=True)]
    spread = None if mass is None else torch.zeros_like(tokens.temperature).index_put((cut,), mass)
    return HeadLogprobs(columns[0], columns[1], spread)


def _kept_support(
    hidden: Tensor, weight: Tensor, ids: Tensor, pairs: tuple[Tensor, Tensor], budget: int, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, log of the kept mass), [A] each. pairs: the row [K] and the id [K] of what was kept.

    A kept set of one gives exactly 0: its logit minus itself.
    """
    local, own = shard.local(pairs[1], len(weight))
    rows, local, kept = pairs[0][own], local[own], pairs[1][own]
    logits = _PairLogits.apply(hidden, weight, rows, local, max(1, budget // (12 * hidden.shape[1])))  # type: ignore[no-untyped-call]
    empty = logits.new_zeros(len(ids))
    peak = shard.max((empty - torch.inf).scatter_reduce(0, rows, logits.detach(), "amax"))
    shifted = logits - peak[rows]
    log_mass = _SumOverRanks.apply(empty.index_add(0, rows, shifted.exp()), shard.sum).log()  # type: ignore[no-untyped-call]
    hit = kept == ids[rows]
    sampled = _SumOverRanks.apply(empty.index_add(0, rows[hit], shifted[hit]), shard.sum)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        log_kept = shifted - log_mass[rows]
        entropies = shard.sum(empty.index_add(0, rows, -(log_kept.exp() * log_kept)))
    return sampled - log_mass, entropies, (peak + log_mass).detach()


@torch.no_grad()
def _mass_off(
    log_kept: Tensor, hidden: Tensor, weight: Tensor, ids: Tensor, budget: int, shard: VocabularyShard
) -> Tensor:
    """1 - e^(log_kept - logsumexp over the vocabulary), [A]."""
    log_all = _full_support(hidden, weight, ids, budget, shard)[2]
    return -torch.expm1((log_kept - log_all).clamp(max=0))


def _full_support(
    hidden: Tensor, weight: Tensor, ids: Tensor, budget: int, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, logsumexp of the logits), [A] each, over the whole vocabulary."""
    num_rows = max(1, budget // (12 * len(weight)))  # logits, their exponentials, and one more in the backward pass
    found: tuple[Tensor, Tensor, Tensor] = _FullSupport.apply(hidden, weight, ids, num_rows, shard)  # type: ignore[no-untyped-call]
    return found


class _PairLogits(torch.autograd.Function):
    """hidden[row] · weight[id] for each pair, [K], `size` pairs at a time in both directions."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, rows, ids)
        ctx.size = size
        logits = hidden.new_empty(len(rows))
        for r, i, out in zip(*(torch.split(x, size) for x in (rows, ids, logits)), strict=True):
            torch.sum(hidden[r].mul_(weight[i]), -1, out=out)
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, ids = ctx.saved_tensors
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for r, i, g in zip(*(torch.split(x, ctx.size) for x in (rows, ids, gradients[0])), strict=True):
            d_hidden.index_add_(0, r, weight[i].mul_(g[:, None]))
            d_weight.index_add_(0, i, hidden[r].mul_(g[:, None]))
        return d_hidden, d_weight, None, None, None


class _FullSupport(torch.autograd.Function):
    """See `_full_support`. With one slice the softmax is kept for the backward pass, with more it is made again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, num_rows: int, shard: VocabularyShard
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns = hidden.new_empty(3, len(hidden))
        local, own = shard.local(ids, len(weight))
        probabilities = hidden.new_empty(0)
        for rows in torch.split(torch.arange(len(hidden), device=hidden.device), num_rows):
            logits = hidden[rows] @ weight.T
            peak = shard.max(logits.amax(1))
            logits -= peak[:, None]
            sampled = shard.sum(torch.where(own[rows], logits.gather(1, local[rows, None]).squeeze(1), 0.0))
            probabilities = logits.exp()
            mass = shard.sum(probabilities.sum(1))
            mean = shard.sum(torch.bmm(probabilities[:, None], logits[:, :, None]).flatten()) / mass
            columns[:, rows] = torch.stack([sampled - mass.log(), mass.log() - mean, peak + mass.log()])
            del logits
            probabilities /= mass[:, None]
        ctx.num_rows, ctx.own = num_rows, own
        ctx.save_for_backward(
            hidden, weight, local, columns[2], probabilities if len(hidden) <= num_rows else hidden.new_empty(0)
        )
        ctx.mark_non_differentiable(*(values := columns.unbind())[1:])
        return values[0], values[1], values[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, log_all, kept = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for rows in torch.split(torch.arange(len(hidden), device=hidden.device), ctx.num_rows):
            if len(hidden) <= ctx.num_rows:
                d_logits = -kept * gradients[0][:, None]
            else:
                d_logits = (hidden[rows] @ weight.T).sub_(log_all[rows, None]).exp_().mul_(-gradients[0][rows, None])
            own = ctx.own[rows]
            d_logits[own.nonzero().squeeze(1), local[rows][own]] += gradients[0][rows][own]
            d_hidden[rows] = d_logits @ weight
            d_weight.addmm_(d_logits.T, hidden[rows])
        return d_hidden, d_weight, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose result every rank uses alike, so that each one's gradient is already the whole one."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, reduce: Reduce) -> Tensor:
        return reduce(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _ShareWithRanks(torch.autograd.Function):
    """The same values on every rank; each rank's gradient is a part of theirs, and the parts are added up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, reduce: Reduce) -> Tensor:
        ctx.reduce = reduce
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.reduce(gradients[0]), None
