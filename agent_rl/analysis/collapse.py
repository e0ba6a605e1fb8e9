"""Whether and where a run collapsed."""

import math
from collections.abc import Sequence
from statistics import median

_FEWEST_BEFORE = 10
"""Steps that a trailing median needs."""
_ROUNDING = 1e-5
"""A mean |d| up to this is rounding error: a step at lag 0, or one after steps that moved no weight."""


def collapse_index(scores: Sequence[float]) -> int | None:
    """The index of the eval at which a run collapsed, or None.

    The first of at least 3 consecutive scores <= 0.6 of the best so far, none of the later ones >= 0.8 of it; a
    NaN counts as low.
    """
    best = -math.inf
    for i, score in enumerate(scores):
        run = scores[i : i + 3]
        low = len(run) == 3 and all(math.isnan(s) or s <= 0.6 * best for s in run)
        if low and best > 0 and not any(s >= 0.8 * best for s in scores[i + 3 :]):
            return i
        best = best if math.isnan(score) else max(best, score)
    return None


def mismatch_collapse_index(mean_abs_d: Sequence[float], window: int = 50) -> int | None:
    """The first of 10 consecutive steps whose mean|d| is above 5x the median of the `window` steps before it.

    The median is the one before the excursion: the excursion itself does not raise it. It is of at least 10 steps
    with more than rounding error, so a run that starts at lag 0, or does not move at first, has not collapsed. A NaN
    counts as above. None if there is no such step.
    """
    for start in range(_FEWEST_BEFORE, len(mean_abs_d) - 9):
        before = [x for x in mean_abs_d[max(0, start - window) : start] if x > _ROUNDING]
        if len(before) >= _FEWEST_BEFORE and all(not x <= 5 * median(before) for x in mean_abs_d[start : start + 10]):
            return start
    return None
