"""What packed attention costs: it grows with the sum of squared lengths, not with the square of the pack.

CPU seconds of a forward and backward pass over packs of as many tokens, cut into more and more segments, against
attention over the whole pack under a [T, T] mask that keeps segments apart.
Usage: python -m benchmarks.packed_attention [TOKENS]
"""

import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agent_rl.trainer.packed_attention import packed_attention

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 64


def packed(inputs: list[Tensor], cu_seqlens: Tensor) -> Tensor:
    return packed_attention(torch.nn.Identity(), *inputs, None, cu_seq_lens_q=cu_seqlens)[0]


def masked(inputs: list[Tensor], cu_seqlens: Tensor) -> Tensor:
    lengths = cu_seqlens.diff().long()
    segment = torch.arange(len(lengths)).repeat_interleave(lengths)
    allowed = (segment[:, None] == segment[None, :]).tril_()
    return scaled_dot_product_attention(*inputs, attn_mask=allowed, enable_gqa=True).transpose(1, 2)


def seconds(total: int, cu_seqlens: Tensor, dense: bool) -> tuple[float, Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, total, HEAD_DIM, requires_grad=True) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    started = time.process_time()
    found = (masked if dense else packed)(inputs, cu_seqlens)
    found.sum().backward()  # type: ignore[no-untyped-call]
    return time.process_time() - started, found.detach()


def main() -> None:
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    torch.set_num_threads(1)
    seconds(256, torch.tensor([0, 256]), dense=False)
    table = Table("segments", "sum of squares", "packed s", "ns a squared token", "masked s", "packed is", "difference")
    for count in (1, 4, 16, 64):
        cu_seqlens = torch.arange(0, total + 1, total // count, dtype=torch.int32)
        squares = float(cu_seqlens.diff().double().pow(2).sum())
        own, found = seconds(total, cu_seqlens, dense=False)
        other, want = seconds(total, cu_seqlens, dense=True)
        per_square = f"{1e9 * own / squares:.0f}"
        figures = (f"{squares:.2g}", f"{own:.2f}", per_square, f"{other:.2f}", f"{other / own:.1f}× faster")
        table.add_row(str(count), *figures, f"{float((found - want).abs().max()):.0e}")
    Console(width=120).print(f"{total} tokens, {HEADS} heads of {HEAD_DIM}, {KEY_HEADS} of keys", table)


if __name__ == "__main__":
    main()
