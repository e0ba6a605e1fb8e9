"""The picture of a sweep: evaluation over training, and where every seed ended."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from agent_rl.analysis.comparison import FinishedRun, mean_and_error, values_by_step

_MANY = 8
"""With more curves their bands hide each other and the legend hides them: the bands go, the legend goes below."""


def sweep_picture(runs: Sequence[FinishedRun], title: str, target: Path) -> None:
    """Left, mean evaluation by step with one standard error; right, each run's last evaluation and their mean.

    The places of a grid are shades of one scale, arms have colours of their own.
    """
    variants = list(dict.fromkeys(run.variant for run in runs))
    many, arms = len(variants) > _MANY, len({run.arm for run in runs}) > 1
    figure = Figure(figsize=(12, 2.6 + 0.28 * len(variants)), layout="constrained")
    curves, ends = figure.subplots(1, 2, width_ratios=(3, 2))
    for position, variant in enumerate(variants):
        own = [run for run in runs if run.variant == variant and run.evals]
        shade = mpl.colormaps["viridis"](0.95 * position / max(len(variants) - 1, 1))
        colour = mpl.colormaps["tab20"](position % 20) if arms else shade
        _curve(curves, own, variant, colour, band=not many)
        _ends(ends, own, len(variants) - 1 - position, colour)
    shown = "mean over seeds" if many else "mean over seeds ± 1 SE"
    curves.set(xlabel="step", ylabel="held-out accuracy", title=f"{title}: {shown}")
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    ends.set_yticks(range(len(variants)), list(reversed(variants)))
    ends.set(xlabel="last held-out accuracy", title="each seed (dots), mean ± 1 SE (bar)")
    for axis in (curves, ends):
        axis.spines[["top", "right"]].set_visible(False)
    if many:
        lines, names = curves.get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    else:
        curves.legend(frameon=False, fontsize=8)
    figure.savefig(target, dpi=110)


def _curve(axis: Any, runs: Sequence[FinishedRun], label: str, colour: Any, band: bool) -> None:
    by_step = values_by_step(runs, "eval_avg")
    steps = list(by_step)
    points = [mean_and_error(values) for values in by_step.values()]
    centres = [centre for centre, _ in points if centre is not None]
    errors = [error or 0.0 for _, error in points]
    axis.plot(steps, centres, "o-", ms=3, lw=1.4, color=colour, label=label)
    if not band:
        return
    lower, upper = ([c + sign * e for c, e in zip(centres, errors, strict=True)] for sign in (-1, 1))
    axis.fill_between(steps, lower, upper, color=colour, alpha=0.15, lw=0)


def _ends(axis: Any, runs: Sequence[FinishedRun], height: float, colour: Any) -> None:
    last = [run.evals[-1][1] for run in runs]
    centre, error = mean_and_error(last)
    axis.plot(last, [height] * len(last), "o", ms=4, color=colour, alpha=0.6)
    if centre is not None:
        axis.errorbar([centre], [height], xerr=[error or 0.0], fmt="|", ms=14, mew=2, color=colour, capsize=4)
