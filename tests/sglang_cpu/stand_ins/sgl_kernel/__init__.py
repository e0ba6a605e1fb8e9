"""What SGLang needs of its kernel package on a CPU that the package was not built for, in plain torch.

SGLang imports `sgl_kernel` whatever the device. With the torch_native attention backend it calls three of its
operators only: the one that writes token slots into the request table, the router's top-k softmax and the hash
behind per-request seeds. Every other name exists, so that imports work, and says what is missing when called.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


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


def murmur_hash32_cpu(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (Appleby 2011, x86 32-bit) of (seed, position, column) as 16 bytes, uint32 [R, C]."""
    seeds, positions = seeds.view(torch.int64)[:, None], positions.long()[:, None]
    hashed = torch.zeros(1, dtype=torch.int64)
    for block in (seeds, seeds >> 32, positions, columns.long()[None]):
        block = _rotated((block & _LOW) * 0xCC9E2D51 & _LOW, 15) * 0x1B873593 & _LOW
        hashed = (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & _LOW
    hashed = hashed ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ (hashed >> shift)) * factor & _LOW
    return hashed.to(torch.uint32)


def _rotated(values: Tensor, bits: int) -> Tensor:
    return ((values << bits) | (values >> (32 - bits))) & _LOW


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
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
_library.impl("topk_softmax_cpu", topk_softmax_cpu, "CPU")
