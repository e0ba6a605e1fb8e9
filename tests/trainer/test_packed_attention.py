"""Packed attention: exact against separate rows, no [T, T] anywhere, and the GPU kernel's call as torch checks it."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from agent_rl.config import model_directory
from agent_rl.trainer.model import load_model
from agent_rl.trainer.packed_attention import packed_attention, variable_length_attention

LENGTHS = [7, 1, 33, 12]
CU_SEQLENS = torch.tensor([0, 7, 8, 41, 53], dtype=torch.int32)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one row by its formula, in the inputs' own precision: [H, L, d] and [H_kv, L, d] → [L, H, d]."""
    repeats = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    scores = query @ key.transpose(1, 2) / query.shape[2] ** 0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_each_segment_is_attended_to_as_a_row_of_its_own(key_heads: int) -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    inputs = [torch.randn(1, heads, total, 8, dtype=torch.float64) for heads in (4, key_heads, key_heads)]
    leaves = [x.requires_grad_() for x in inputs]
    found, weights = packed_attention(torch.nn.Identity(), *leaves, None, cu_seq_lens_q=CU_SEQLENS)
    assert weights is None
    rows = zip(*(x[0].split(LENGTHS, 1) for x in leaves), strict=True)
    want = torch.cat([plain(*row) for row in rows])[None]
    torch.testing.assert_close(found, want)
    up = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(found, leaves, up), torch.autograd.grad(want, leaves, up), strict=True):
        torch.testing.assert_close(a, b)


def test_a_segment_does_not_see_the_others_through_a_whole_model() -> None:
    model = load_model(str(model_directory("builtin:tiny-qwen3")))
    alone = AutoModelForCausalLM.from_pretrained(model_directory("builtin:tiny-qwen3"), dtype=torch.float32).eval()
    ids = torch.randint(0, 100, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, cu_seq_lens_q=CU_SEQLENS, use_cache=False).logits[0]
        rows = [alone(row, use_cache=False).logits[0] for row in ids.split(LENGTHS, 1)]
    torch.testing.assert_close(packed, torch.cat(rows), atol=2e-5, rtol=1e-5)


def test_nothing_that_is_kept_or_made_has_the_size_of_a_square() -> None:
    """Over a long pack: the largest tensor saved for the backward pass is as long as its inputs."""
    total = 4096
    cu_seqlens = torch.arange(0, total + 1, 256, dtype=torch.int32)
    leaves = [torch.randn(1, heads, total, 8, requires_grad=True) for heads in (2, 1, 1)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        packed_attention(torch.nn.Identity(), *leaves, None, cu_seq_lens_q=cu_seqlens)
    assert 0 < max(t.numel() for t in saved) <= 2 * total * 8


@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_kernel_of_a_gpu_is_called_as_torch_wants_it(key_heads: int) -> None:
    """Without a GPU: torch's own checks and shapes of the operator, forward and backward, on tensors without data."""
    with FakeTensorMode():
        inputs = [
            torch.empty(1, heads, 53, 16, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, key_heads, key_heads)
        ]
        cu_seqlens = torch.empty(len(CU_SEQLENS), dtype=torch.int32)
        found = variable_length_attention(*inputs, cu_seqlens, max(LENGTHS), None)
        assert found.shape == (1, 53, 4, 16)
        assert found.dtype == torch.bfloat16
        found.sum().backward()
        assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]
