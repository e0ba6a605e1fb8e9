"""The output layer of a causal LM that answers with log-probs of sampled tokens instead of logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from agent_rl.trainer.kept_head import WHOLE, HeadLogprobs, SampledTokens, VocabularyShard, head_logprobs
from agent_rl.trainer.shards import local


class TokenHead:
    """Takes the place of the forward of a model's output layer, so that it runs where the layer's weights are whole,
    also under FSDP. Unless something is `asked`, the layer gives logits as before.

    Raises `ValueError` if the model does something to its logits after that layer.
    """

    def __init__(self, model: Any, budget_bytes: int, shard: VocabularyShard = WHOLE) -> None:
        self.layer, self.budget_bytes, self.shard = model.get_output_embeddings(), budget_bytes, shard
        self._asked: tuple[SampledTokens, bool] | None = None
        _check_plain(model, self.layer)
        self.layer.forward = self._forward

    @contextmanager
    def asked(self, tokens: SampledTokens, off_support: bool) -> Iterator[None]:
        """In the block the model's `logits` are input of `answer`; the model must keep the states of `tokens`."""
        self._asked = tokens, off_support
        try:
            yield
        finally:
            self._asked = None

    @staticmethod
    def answer(logits: Tensor) -> HeadLogprobs:
        """The log-probs in what the model returned as `logits` [1, A, columns]."""
        columns = logits[0].unbind(-1)
        return HeadLogprobs(columns[0], columns[1].detach(), columns[2].detach() if len(columns) > 2 else None)

    def _forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        if self._asked is None:
            return linear(hidden, weight.full_tensor() if isinstance(weight, DTensor) else weight, bias)
        weight = local(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            states = hidden[0].float()
            if bias is not None:
                states = torch.cat([states, torch.ones_like(states[:, :1])], 1)
                weight = torch.cat([weight, bias[:, None]], 1)
            tokens, off_support = self._asked
            found = head_logprobs(states, weight, tokens, self.budget_bytes, off_support, self.shard)
            return torch.stack([column[None] for column in found if column is not None], -1)


@torch.no_grad()
def _check_plain(model: Any, layer: torch.nn.Module) -> None:
    """Raise `ValueError` if the model changes what its output layer gives, by a cap or a scale."""
    probe = 100.0
    hook = layer.register_forward_hook(lambda _layer, _inputs, output: torch.full_like(output, probe))
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32, device=model.device)
    logits = model(input_ids=ids, cu_seq_lens_q=cu_seqlens, use_cache=False).logits
    hook.remove()
    if not bool((logits == probe).all()):
        raise ValueError(
            f"a {model.config.model_type} model changes its logits after its output layer, which the trainer's head "
            "would leave out; choose a model without a logit cap or scale"
        )
