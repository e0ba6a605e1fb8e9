"""What SGLang needs of its kernel package on a CPU that the package was not built for, in plain torch.

SGLang imports `sgl_kernel` whatever the device. With the torch_native attention backend it calls two of its
operators only: the one that writes token slots into the request table, and the router's top-k softmax. Every
other name exists, so that imports work, and says what is missing when it is called.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, stride: int | None = None
) -> None:
    """table[rows[i], starts[i]:ends[i]] = the next ends[i] - starts[i] entries of `slots`."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def topk_softmax_cpu(
    hidden: Tensor, logits: Tensor, top_k: int, renormalize: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights [T, top_k] and int32 ids [T, top_k] of the experts with the largest probability (plus bias)."""
    probabilities = logits.float().softmax(-1)
    ranked = probabilities if bias is None else probabilities + bias
    ids = ranked.topk(top_k, -1).indices
    weights = probabilities.gather(-1, ids)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids.int()


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in in plain torch")

    return missing


_library = torch.library.Library("sgl_kernel", "DEF")  # kept: operators go when their library does
_library.define(
    "topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, "
    "Tensor? correction_bias=None) -> (Tensor, Tensor)"
)
_library.impl("topk_softmax_cpu", topk_softmax_cpu, "CPU")
