"""How the terms of tokens become one number: the weights of the average, over the whole optimizer step."""

import torch
from torch import Tensor

from agent_rl.objective.config import Aggregate
from agent_rl.objective.token_batch import ActiveTokens


def token_weights(
    tokens: ActiveTokens, num_tokens: int, num_sequences: int, aggregate: Aggregate, sequence_length: int | None = None
) -> Tensor:
    """The weight of each active token, [A], from the step's denominators over all micro-batches and ranks.

    token_mean: 1 / num_tokens. sequence_mean: 1 / (num_sequences * active tokens of its response). sequence_sum: 1 /
    (num_sequences * sequence_length), which does not depend on how long a response became (Dr. GRPO, arXiv
    2503.20783, section 3.1).
    """
    if aggregate == "token_mean":
        return torch.full_like(tokens.advantages, 1 / num_tokens)
    if aggregate == "sequence_sum":
        assert sequence_length is not None
        return torch.full_like(tokens.advantages, 1 / (num_sequences * sequence_length))
    return 1 / (num_sequences * tokens.sequence_lengths.to(tokens.advantages))
