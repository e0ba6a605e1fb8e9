"""Log-probs and entropies of sampled tokens, replayed as they were sampled. The shift by one is here."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from agent_rl.objective.token_batch import TokenBatch
from agent_rl.trainer.kept_head import SampledTokens
from agent_rl.trainer.routing_replay import replay_routing


class TokenLogprobs(NamedTuple):
    """float32 [T] each, 0 on tokens that the policy did not sample; only `logprobs` has a gradient.

    off_support: the probability that the model gives to tokens outside the recorded kept set; None where no kept
    set is recorded, since there it is 0, and where it was not asked for.
    """

    logprobs: Tensor
    entropies: Tensor
    off_support: Tensor | None


def token_logprobs(model: Any, batch: TokenBatch, off_support: bool = False) -> TokenLogprobs:
    """Log-probs and entropies of a packed batch under a model from `load_model`; on demand the mass off kept sets too.

    Column t describes token t: its distribution is the output at t - 1. Logits are divided by the
    temperature that the token was sampled at and normalised over its recorded kept set.
    """
    active = batch.loss_mask.nonzero().squeeze(1)
    tokens = SampledTokens(batch.token_ids[active], batch.temperature[active], batch.kept_ids, batch.kept_offsets)
    with model.token_head.asked(tokens, off_support):
        found = model.token_head.answer(_outputs(model, batch, active))
    zeros = found.logprobs.new_zeros(len(batch))
    mass = found.off_support
    return TokenLogprobs(
        zeros.index_put((active,), found.logprobs),
        zeros.index_put((active,), found.entropies),
        None if mass is None else zeros.index_put((active,), mass),
    )


def active_logits(model: Any, batch: TokenBatch, active: Tensor) -> Tensor:
    """The logits, float32 [A, V], that the tokens at `active` [A] were sampled from, over their temperature.

    Experts are the recorded ones, where there are any.
    """
    return _outputs(model, batch, active)[0].float() / batch.temperature[active, None]


def _outputs(model: Any, batch: TokenBatch, active: Tensor) -> Tensor:
    """What the output layer makes of the states that the tokens at `active` [A] were sampled from, [1, A, columns]."""
    replay_routing(model, batch.routed_experts)
    with torch.autocast(batch.token_ids.device.type, torch.bfloat16, enabled=model.compute.precision == "bfloat16"):
        output = model(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            cu_seq_lens_q=batch.cu_seqlens,
            logits_to_keep=active - 1,
            use_cache=False,
        )
    logits: Tensor = output.logits
    return logits
