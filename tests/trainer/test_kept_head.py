"""The head: equal to dense, masked logits in float64, in slices of any size, and over two ranks."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM

from agent_rl.trainer.kept_head import SampledTokens, head_logprobs
from agent_rl.trainer.model import load_model
from agent_rl.trainer.packing import pack
from agent_rl.trainer.token_logprobs import token_logprobs
from tests.trainer.head_ranks import FIRST, VOCABULARY, forward_and_backward, problem, rank_main
from tests.trajectories import VOCABULARY as TRAJECTORY_VOCABULARY
from tests.trajectories import random_trajectory


def dense(hidden: Tensor, weight: Tensor, tokens: SampledTokens) -> SimpleNamespace:
    """The plain way: all logits, those outside of the kept set at -inf; in float64."""
    logits = hidden.double() @ weight.double().T / tokens.temperature.double()[:, None]
    inside = torch.ones_like(logits, dtype=torch.bool)
    if tokens.kept_ids is not None and tokens.kept_offsets is not None:
        for row, (a, b) in enumerate(zip(tokens.kept_offsets, tokens.kept_offsets[1:], strict=False)):
            if a < b:
                inside[row] = False
                inside[row, tokens.kept_ids[a:b]] = True
    logprobs = logits.masked_fill(~inside, -torch.inf).log_softmax(-1)
    return SimpleNamespace(
        logprobs=logprobs.gather(1, tokens.ids[:, None]).squeeze(1),
        entropies=torch.special.entr(logprobs.exp()).sum(-1),
        off_support=(logits.softmax(-1) * ~inside).sum(-1),
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(0, 12),
    largest=st.integers(0, 9),
    budget=st.sampled_from([1, 600, 1 << 20]),
    scale=st.sampled_from([1.0, 30.0]),
)
def test_equal_to_dense_masked_logits(seed: int, rows: int, largest: int, budget: int, scale: float) -> None:
    generator, vocabulary = torch.Generator().manual_seed(seed), 23
    hidden = (scale * torch.randn(rows, 5, generator=generator)).requires_grad_()
    weight = torch.randn(vocabulary, 5, generator=generator).requires_grad_()
    sets = [torch.randperm(vocabulary, generator=generator)[:largest] for _ in range(rows)]
    sets = [s[: int(torch.randint(len(s) + 1, (), generator=generator))] for s in sets]
    ids = torch.tensor([int(s[-1]) if len(s) else 3 for s in sets], dtype=torch.int64)
    kept = torch.cat([torch.empty(0, dtype=torch.int64), *sets])
    offsets = torch.tensor([0, *map(len, sets)]).cumsum(0)
    tokens = SampledTokens(ids, torch.rand(rows, generator=generator) + 0.5, kept, offsets)
    found, want = head_logprobs(hidden, weight, tokens, budget, off_support=True), dense(hidden, weight, tokens)
    for name in ("logprobs", "entropies", "off_support"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(want, name), atol=1e-5 * scale, rtol=1e-5)
    assert (found.logprobs[offsets.diff() == 1] == 0).all(), "a set of one is certain, exactly"
    up = torch.linspace(-1, 2, rows)
    gradients = torch.autograd.grad((found.logprobs * up).sum(), [hidden, weight])
    expected = torch.autograd.grad((want.logprobs * up).sum(), [hidden, weight])
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * scale, rtol=1e-4)


def test_two_ranks_with_half_the_vocabulary_each_agree_with_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank_main, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    whole = [forward_and_backward(kept, budget) for kept in (False, True) for budget in (1, 1 << 20)]
    assert 0 < FIRST[1] < VOCABULARY - 1
    for case, want in enumerate(whole):
        for own in (ranks[0][case], ranks[1][case]):
            for a, b in zip(own[:-1], want[:-1], strict=True):
                torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(torch.cat([r[case][-1] for r in ranks]), want[-1], atol=2e-6, rtol=1e-5)
    hidden, weight, tokens = problem(kept=True)
    want = dense(hidden, weight, tokens)
    torch.testing.assert_close(whole[3][0].double(), want.logprobs, atol=1e-5, rtol=1e-5)


def test_what_is_saved_for_the_backward_pass_does_not_grow_with_the_vocabulary() -> None:
    sizes = {}
    for vocabulary in (50, 5000):
        weight = torch.randn(vocabulary, 4).requires_grad_()
        hidden = torch.randn(64, 4, requires_grad=True)
        offsets = torch.arange(0, 64 * 3 + 1, 3)
        tokens = SampledTokens(torch.ones(64, dtype=torch.int64), torch.ones(64), torch.tensor([0, 1, 2] * 64), offsets)
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            head_logprobs(hidden, weight, tokens, 1 << 20)
        sizes[vocabulary] = sum(t.numel() for t in saved if t.shape != weight.shape)
    assert sizes[50] == sizes[5000] > 0


def test_a_bias_of_the_output_layer_counts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=TRAJECTORY_VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    made = PhiForCausalLM(config)
    torch.nn.init.normal_(made.lm_head.bias)
    made.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    trajectory = random_trajectory(np.random.default_rng(0), 0, top_p=0.9)
    batch = pack([trajectory], [0.0])
    found = token_logprobs(model, batch, off_support=True)
    found.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert model.lm_head.bias.grad.abs().max() > 0
    rows = batch.active.index
    with torch.no_grad():
        logits = model(batch.token_ids[None], cu_seq_lens_q=batch.cu_seqlens).logits[0, rows - 1].double()
    unscaled = SampledTokens(batch.token_ids[rows], batch.temperature[rows], batch.kept_ids, batch.kept_offsets)
    want = dense(logits, torch.eye(TRAJECTORY_VOCABULARY), unscaled)
    torch.testing.assert_close(found.logprobs[rows].double(), want.logprobs, atol=1e-5, rtol=1e-5)
    assert found.off_support is not None
    torch.testing.assert_close(found.off_support[rows].double(), want.off_support, atol=1e-5, rtol=1e-5)


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gemma2 model changes its logits after its output layer"):
        load_model(str(tmp_path))
