"""Intervals for the audits: of an expectation over episodes, of what the sampled states really cost, of a share."""

import math

_RATES = tuple(0.05 * 2**i for i in range(8))
"""The exponents that `visited_interval` tries; each has a part of `delta`."""


def bernstein_margin(variance: float, count: int, span: float, delta: float = 0.05) -> float:
    """The margin that an expected mean exceeds the mean of a sample by with probability at most `delta`.

    Of `count` independent values in an interval of length `span`, `variance` (ddof 1) theirs. By symmetry it is the
    margin below too. The empirical Bernstein bound of Maurer and Pontil, "Empirical Bernstein bounds and
    sample-variance penalization" (COLT 2009), theorems 4 and 11; infinite for one value.
    """
    if count < 2:
        return math.inf
    log = math.log(2 / delta)
    return math.sqrt(2 * variance * log / count) + 7 * span * log / (3 * (count - 1))


def visited_interval(total: float, delta: float = 0.05) -> tuple[float, float]:
    """Limits of the summed total variation at the states that were visited, each wrong w.p. at most `delta`.

    `total` is the sum of z = (1 - r)+ over all sampled tokens, each z in [0, 1] with mean D(s) given the past. By
    convexity E exp(-c z) <= exp(-(1 - exp(-c)) D) and E exp(c z) <= exp((exp(c) - 1) D), so that products over tokens,
    however these depend on each other, are supermartingales, and Markov's inequality gives the limits for each c > 0;
    the best of a fixed few is taken. Needs neither a longest episode nor a variance, unlike `bernstein_margin`, but
    speaks of these states, not of those that other rollouts would visit.
    """
    log = math.log(len(_RATES) / delta)
    low = max((c * total - log) / math.expm1(c) for c in _RATES)
    high = min((c * total + log) / -math.expm1(-c) for c in _RATES)
    return max(low, 0.0), high


def wilson_interval(count: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """An interval of about 95 % for a probability of which `count` of `trials` came true (Wilson 1927)."""
    if trials == 0:
        return 0.0, 1.0
    share, scale = count / trials, 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2) / scale
    return max(centre - half, 0.0), min(centre + half, 1.0)
