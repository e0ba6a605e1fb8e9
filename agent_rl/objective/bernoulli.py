"""Divergences between two policies that look at the sampled token alone: it came, or something else came."""

import torch
from torch import Tensor


def representable(log_p: Tensor) -> Tensor:
    """Log-probs, with those that rounded to 0 or above it at the largest number below 0 that their dtype resolves.

    A kernel of finite precision says no more of a sure token; an exact 1 would put every other policy at infinity.
    """
    return log_p.clamp(max=-torch.finfo(log_p.dtype).eps / 2)


def bernoulli_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(Bernoulli(p) || Bernoulli(q)) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)) from log p, log q; any shape.

    Taken through expm1, so that probabilities near 1 keep their digits. 0 where p = q = 1; inf where q = 1 > p.
    Log-probs above 0 by rounding count as 0.
    """
    log_p, log_q = log_p.clamp(max=0), log_q.clamp(max=0)
    rest_p, rest_q = torch.expm1(log_p).abs(), torch.expm1(log_q).abs()
    rest = torch.where(rest_p > 0, rest_p * (rest_p / rest_q).log(), torch.zeros_like(rest_p))
    return log_p.exp() * (log_p - log_q) + rest


def bernoulli_tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation |p - q| of the two Bernoullis, from log p and log q; any shape."""
    return (log_p.exp() - log_q.exp()).abs()
