"""What an evaluation's samples say of a policy: avg@n, pass@k and maj@n, with bootstrap intervals over problems.

Everything here is a mean over problems of a number a problem; an interval resamples the problems, since the samples
of one problem are no independent evidence.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

Array = npt.NDArray[np.float64]

NUM_RESAMPLES = 4000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over problems in [0, 1] (a difference of two: in [-1, 1]), with its 95 % bootstrap interval."""

    name: str
    value: float
    low: float
    high: float


def avg_at_n(correct: Array) -> Array:
    """Share of right samples of each problem, [P], from `correct` [P, n], 0/1."""
    return np.asarray(correct.mean(1), np.float64)


def pass_at_k(correct: Array, k: int) -> Array:
    """Chance that one of k samples solves each problem, [P], from n >= k samples each: `correct` [P, n], 0/1.

    The unbiased 1 - C(n - c, k) / C(n, k) of "Evaluating LLMs trained on code" (arXiv 2107.03374), c the number
    of correct samples. Raises `ValueError` unless 1 <= k <= n.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples a problem and k of at least 1, got {n} samples")
    return np.array([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in correct.sum(1)])


def maj_at_n(correct: Array, answers: Sequence[Sequence[str | None]]) -> Array:
    """Whether the answer given most often is right, [P]; of answers given equally often, the first one given counts.

    A sample without an answer has no vote; a problem without any vote is not solved.
    """
    return np.array([_vote(right, given) for right, given in zip(correct, answers, strict=True)])


def _vote(correct: Array, answers: Sequence[str | None]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    winner = votes.most_common(1)[0][0]  # equal counts stand in the order of their first vote
    return float(correct[answers.index(winner)])


def pass_ks(n: int) -> list[int]:
    """The k that pass@k is told for, of n samples: the powers of two below n, and n."""
    return [*(2**i for i in range(1, n.bit_length()) if 2**i < n), *([n] if n > 1 else [])]


def per_problem(rows: pl.DataFrame) -> dict[str, Array]:
    """Each metric's number a problem, [P] in the order of `problem`, from the rows of `facts.EVALUATION`.

    avg@n is the mean of the outcomes, whatever a reward gives; for pass@k and maj@n an outcome of at least 1 is
    right. Problems with an episode that the infrastructure broke are left out. Raises `ValueError` if none is left.
    """
    n = rows["sample"].n_unique()
    whole = (
        rows.sort("problem", "sample")
        .group_by("problem", maintain_order=True)
        .agg("outcome", "final_answer", pl.col("failure").null_count().alias("intact"))
        .filter(pl.col("intact") == n)
    )
    if whole.is_empty():
        raise ValueError("no evaluation prompt could be run: the infrastructure failed under all of them")
    correct = np.array(whole["outcome"].to_list(), np.float64)
    solved = (correct >= 1).astype(np.float64)
    return {
        f"avg@{n}": avg_at_n(correct),
        **{f"pass@{k}": pass_at_k(solved, k) for k in pass_ks(n)},
        **({f"maj@{n}": maj_at_n(solved, whole["final_answer"].to_list())} if n > 1 else {}),
    }


def bootstrap_interval(name: str, values: Array, seed: int = 0) -> Interval:
    """The mean of `values` [P] with its percentile-bootstrap interval over problems (Efron and Tibshirani 1993)."""
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(NUM_RESAMPLES)]
    low, high = np.quantile(means, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return Interval(name, float(values.mean()), float(low), float(high))
