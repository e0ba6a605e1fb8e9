"""Log-probs and entropies of sampled tokens, replayed as they were sampled. The shift by one is here."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from agent_rl.objective.token_batch import TokenBatch
from agent_rl.trainer.kept_head import HeadLogprobs, SampledTokens
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
    kept = (None if rows is None else rows.to(model.device) for rows in (batch.kept_ids, batch.kept_offsets))
    sampled = (values[active].to(model.device) for values in (batch.token_ids, batch.temperature))
    with model.token_head.asked(SampledTokens(*sampled, *kept), off_support):
        found: HeadLogprobs = model.token_head.answer(_outputs(model, batch, active))
    zeros = found.logprobs.new_zeros(len(batch), device=batch.token_ids.device)

    def at_tokens(values: Tensor) -> Tensor:
        return zeros.index_put((active,), values.to(zeros.device))

    mass = found.off_support
    return TokenLogprobs(
        at_tokens(found.logprobs), at_tokens(found.entropies), None if mass is None else at_tokens(mass)
    )


def active_logits(model: Any, batch: TokenBatch, active: Tensor) -> Tensor:
    """The logits, float32 [A, V], that the tokens at `active` [A] were sampled from, over their temperature.

    Experts are the recorded ones, where there are any.
    """
    logits = _outputs(model, batch, active)[0].float() / batch.temperature[active, None].to(model.device)
    found: Tensor = logits.to(active.device)
    return found


def _outputs(model: Any, batch: TokenBatch, active: Tensor) -> Tensor:
    """What the output layer makes of the states that the tokens at `active` [A] were sampled from, [1, A, columns].

    The batch may be elsewhere than the model; what this returns is where the model is.
    """
    device = model.device
    replay_routing(model, None if batch.routed_experts is None else batch.routed_experts.to(device))
    with torch.autocast(device.type, torch.bfloat16, enabled=model.compute.precision == "bfloat16"):
        output = model(
            input_ids=batch.token_ids[None].to(device),
            position_ids=batch.position_ids[None].to(device),
            cu_seq_lens_q=batch.cu_seqlens.to(device),
            logits_to_keep=(active - 1).to(device),
            use_cache=False,
        )
    logits: Tensor = output.logits
    return logits
