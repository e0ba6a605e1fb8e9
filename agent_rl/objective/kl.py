"""KL to a reference policy, estimated on the sampled tokens."""

import torch
from torch import Tensor

_BOUND = 10.0


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k3 estimator e^x - 1 - x, x = ref - lp, of KL(policy || reference), clamped to [-10, 10]; any shape.

    Non-negative and unbiased (Schulman, "Approximating KL divergence", 2020). Where the clamp acts the gradient
    is 0; x itself is held to +-20, which the clamp hides, so that e^x cannot overflow into a NaN gradient.
    """
    x = (ref_logprobs - logprobs).clamp(-2 * _BOUND, 2 * _BOUND)
    return (torch.expm1(x) - x).clamp(-_BOUND, _BOUND)
