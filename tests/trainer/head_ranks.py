"""What each process of the sharded head's test does; a file of its own, so that spawned processes can import it."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from agent_rl.trainer.kept_head import WHOLE, HeadLogprobs, SampledTokens, VocabularyShard, head_logprobs

TOKENS, HIDDEN, VOCABULARY = 40, 6, 31
FIRST = {0: 0, 1: 17}
"""Where the vocabulary of a rank begins."""


def problem(kept: bool) -> tuple[Tensor, Tensor, SampledTokens]:
    """Hidden states, weights, tokens; with kept sets every fifth row has none and every third holds one id."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    temperature = torch.rand(TOKENS, generator=generator) + 0.5
    if not kept:
        return hidden, weight, SampledTokens(ids, temperature)
    sets = []
    for row, token in enumerate(ids.tolist()):
        others = torch.randperm(VOCABULARY, generator=generator)[: 0 if row % 3 == 0 else 7]
        sets.append(
            torch.empty(0, dtype=torch.int64) if row % 5 == 0 else torch.unique(torch.cat([others, ids[row : row + 1]]))
        )
        assert row % 5 == 0 or token in sets[-1]
    offsets = torch.tensor([0, *map(len, sets)]).cumsum(0)
    return hidden, weight, SampledTokens(ids, temperature, torch.cat(sets), offsets)


def forward_and_backward(
    kept: bool, budget: int, shard: VocabularyShard = WHOLE, end: int = VOCABULARY
) -> list[Tensor]:
    """Log-probs, entropies, mass off the kept set, and gradients of hidden states and of this rank's weights."""
    hidden, weight, tokens = problem(kept)
    hidden.requires_grad_()
    own = weight[shard.first : end].clone().requires_grad_()
    found: HeadLogprobs = head_logprobs(hidden, own, tokens, budget, off_support=True, shard=shard)
    (found.logprobs * torch.linspace(-1, 2, TOKENS)).sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert own.grad is not None
    columns = [column.detach() for column in found if column is not None]
    return [*columns, hidden.grad, own.grad]


def rank_main(rank: int, directory: str) -> None:
    """One of two processes over gloo, each with a part of the vocabulary; results go to `directory`."""
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))

    def reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        found = tensor.clone()
        dist.all_reduce(found, op=operation)
        return found

    shard = VocabularyShard(
        FIRST[rank], lambda tensor: reduce(tensor, dist.ReduceOp.SUM), lambda tensor: reduce(tensor, dist.ReduceOp.MAX)
    )
    end = FIRST.get(rank + 1, VOCABULARY)
    found = [forward_and_backward(kept, budget, shard, end) for kept in (False, True) for budget in (1, 1 << 20)]
    torch.save(found, Path(directory) / f"{rank}.pt")
    dist.destroy_process_group()
