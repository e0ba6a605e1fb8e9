"""Keys and values in slots, and the attention of one packed step over them.

A step packs the new tokens of all its rows into one axis of N tokens: one for a decoding row, many for a
row in prefill. Linear layers see no padding; only attention pads, and rows of like width attend together.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agent_rl.records import IntArray, LongArray


@dataclass(frozen=True)
class Block:
    """Rows that attend together, as [height, width] queries against the first `length` keys of `slots`.

    Packed token `tokens[i]` is the query at `rows[i], columns[i]`; `bias` [height, 1, width, length] is 0
    where a query sees a key and -inf elsewhere. `exact` says that the packed tokens are the block as it is.
    """

    tokens: Tensor
    rows: Tensor
    columns: Tensor
    slots: slice | Tensor
    bias: Tensor
    exact: bool


@dataclass(frozen=True)
class Step:
    """One packed step: `token_ids`, `positions`, `slots` are int64 [N]; logits are wanted at `keep` [R]."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    keep: Tensor
    blocks: tuple[Block, ...]


def plan_step(tokens: IntArray, slots: LongArray, start: LongArray, count: LongArray, keep: LongArray) -> Step:
    """Pack `count[r]` tokens of each row r from position `start[r]` of row `slots[r]` of `tokens`.

    `slots` must be ascending; `keep` lists the rows whose last packed token needs logits.
    """
    ends = np.cumsum(count)
    column = np.zeros(len(slots), np.int64)
    if ends[-1] > len(slots):
        column = np.arange(ends[-1]) - np.repeat(ends - count, count)
    widths = _width_class(count)
    packed = _Packed(np.repeat(slots, count), np.repeat(start, count) + column, column, np.repeat(widths, count))
    return Step(
        token_ids=torch.from_numpy(tokens[packed.slots, packed.positions].astype(np.int64)),
        positions=torch.from_numpy(packed.positions),
        slots=torch.from_numpy(packed.slots),
        keep=torch.from_numpy(ends[keep] - 1),
        blocks=tuple(_plan_block(packed, width) for width in sorted(set(widths.tolist()))),
    )


@dataclass(frozen=True)
class _Packed:
    """The packed tokens as arrays [N]: slot, position, place within its row's new ones, width class of the row."""

    slots: LongArray
    positions: LongArray
    columns: LongArray
    widths: LongArray


def _width_class(count: LongArray) -> LongArray:
    """0 for 1, 1 for 2-4, 2 for 5-16, ...: padding a block costs its attention at most a factor of four."""
    return np.ceil(np.log2(count) / 2).astype(np.int64)


def _plan_block(packed: _Packed, width_class: int) -> Block:
    tokens = np.flatnonzero(packed.widths == width_class)
    slots, columns, positions = packed.slots[tokens], packed.columns[tokens], packed.positions[tokens]
    own = slots[columns == 0]
    top = int(own[-1]) + 1
    # A view of the leading slots, with some idle rows in it, is cheaper than a copy of the wanted ones.
    dense = 2 * len(own) >= top
    rows = slots if dense else np.searchsorted(own, slots)
    last_seen = np.zeros((top if dense else len(own), int(columns.max()) + 1), np.int64)
    last_seen[rows, columns] = positions
    hidden = np.arange(positions.max() + 1) > last_seen[:, None, :, None]
    return Block(
        tokens=torch.from_numpy(tokens),
        rows=torch.from_numpy(rows),
        columns=torch.from_numpy(columns),
        slots=slice(0, top) if dense else torch.from_numpy(own),
        bias=torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), float("-inf")),
        exact=len(tokens) == len(packed.slots) == last_seen.size,
    )


class KVCache:
    """Per layer, keys and values [slots, kv_heads, max_tokens, head_dim], made when a layer first writes."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._shape = (num_slots, max_tokens)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Drop everything, so that no value of a failed step is ever multiplied by a zero weight."""
        self._layers.clear()

    def attend(self, layer: int, step: Step, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store `key`, `value` [N, kv_heads, D] and attend `query` [N, heads, D]; returns [N, heads, D]."""
        if layer not in self._layers:
            self._layers[layer] = (self._allocate(key), self._allocate(value))
        keys, values = self._layers[layer]
        keys[step.slots, :, step.positions] = key
        values[step.slots, :, step.positions] = value
        if step.blocks[0].exact:
            return _attend_block(step.blocks[0], query, keys, values, scale)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for block in step.blocks:
            out[block.tokens] = _attend_block(block, query, keys, values, scale)
        return out

    def _allocate(self, like: Tensor) -> Tensor:
        num_slots, max_tokens = self._shape
        return like.new_zeros(num_slots, like.shape[1], max_tokens, like.shape[2])


def _attend_block(block: Block, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    height, _, width, length = block.bias.shape
    if not block.exact:
        padded = query.new_zeros(height, width, *query.shape[1:])
        padded[block.rows, block.columns] = query[block.tokens]
        query = padded.flatten(0, 1)
    keys, values = keys[block.slots, :, :length], values[block.slots, :, :length]
    attend = _attend_one if width == 1 else _attend_many
    out = attend(query, keys, values, block.bias.to(query.dtype), scale)
    return out if block.exact else out.view(height, width, *out.shape[1:])[block.rows, block.columns]


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """One query position a row, by plain products: with so few queries the fused kernel is the slower one.

    Query heads that share a kv head are further queries of it, here and below: no key is repeated.
    """
    (height, kv_heads), (_, heads, dim) = keys.shape[:2], query.shape
    bias = bias[:, 0] if kv_heads == 1 else bias[:, 0].repeat_interleave(kv_heads, 0)
    folded = query.reshape(height * kv_heads, heads // kv_heads, dim)
    scores = torch.baddbmm(bias, folded, keys.flatten(0, 1).mT, alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), values.flatten(0, 1)).view(height, heads, -1)


def _attend_many(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    (height, kv_heads), (_, heads, dim) = keys.shape[:2], query.shape
    group = heads // kv_heads
    folded = query.reshape(height, -1, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(height, kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(folded, keys, values, bias.repeat(1, 1, group, 1), scale=scale)
    return out.view(height, kv_heads, group, -1, out.shape[-1]).permute(0, 3, 1, 2, 4).reshape(-1, heads, out.shape[-1])
