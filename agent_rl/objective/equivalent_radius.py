"""The constant radius that gives PPO the gradient SAT has on a batch with quantile q."""

import math


def equivalent_radii(q: float, eps_low: float, eps_high: float) -> tuple[float, float]:
    """The (low, high) radii of PPO whose gradient equals SAT's when gate and clip use one scalar.

    SAT clips the low side where 1 - e^-u > eps_low c(u) and the high side where e^u - 1 > eps_high c(u), with
    c = 1 / (1 + (u / q)^2) beyond q and 1 up to it. Both sides of the inequality cross once, at the radius.
    q = 0 gates nothing: the radii are the full ones.
    """
    if q == 0:
        return eps_low, eps_high
    low = min(eps_low, -math.expm1(-_crossing(q, eps_low, -1)))
    if q >= math.log1p(eps_high):  # nothing tightens before the full radius is reached; e^q may not be a number
        return low, eps_high
    return low, math.expm1(_crossing(q, eps_high, 1))


def _crossing(q: float, eps: float, sign: int) -> float:
    """The smallest u >= q with |e^(sign u) - 1| >= eps / (1 + (u / q)^2), by bisection to the last bit."""
    low, high = q, max(q, math.log1p(eps), 1.0)
    while low < (middle := low + (high - low) / 2) < high:
        beyond = _moved(middle, sign) >= eps / (1 + (middle / q) ** 2)
        low, high = (low, middle) if beyond else (middle, high)
    return high


def _moved(u: float, sign: int) -> float:
    return abs(math.expm1(sign * u))
