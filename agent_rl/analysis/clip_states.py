"""What the objective did to each token of a step, worked out again from what the run recorded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from agent_rl.analysis.recorded import RecordedRun

INSIDE, GATED, CLIPPED, NEWLY_CLIPPED, DROPPED = range(5)
"""Inside the trust region; inside, though the region was tightened; no gradient; none because of the tightening;
weighed 0 by a gate."""

_MOST_CELLS = 4_000_000
"""Episodes times the longest of them; a larger batch is not worked out again."""
_TOLERANCE = 2e-3
"""Of a share of tokens: float32 log-probs at the edge of a radius may fall on either side."""

Array = npt.NDArray[Any]


def clip_states(run: RecordedRun, step: int, rows: Sequence[dict[str, Any]]) -> tuple[list[Array] | None, str]:
    """The state of each token, int [L] a row, from all trajectories of a step; or None and why.

    The run's objective is evaluated on the recorded log-probs and advantages. A clip that remembers earlier steps
    may find something else than the run did: states are given only if they gate and clip as many tokens as the run
    recorded.
    """
    from agent_rl.objective import ObjectiveConfig, evaluate  # heavy
    from agent_rl.settings import check

    longest = max(len(row["token_ids"]) for row in rows)
    if len(rows) * longest > _MOST_CELLS:
        return None, "clip states are not shown: the batches are too large to be worked out again"
    mask = _padded(rows, longest, "loss_mask").astype(bool)
    optional = [name for name in ("proximal_logprobs", "ref_logprobs") if all(row[name] is not None for row in rows)]
    arrays = {name: _padded(rows, longest, name) for name in ("logprobs", "behavior_logprobs", "turn_ids", *optional)}
    try:
        objective = check(ObjectiveConfig, run.config.get("objective") or {}, "objective")
        values = evaluate(
            objective,
            loss_mask=mask,
            advantages=np.repeat(np.asarray([[row["advantage"]] for row in rows], np.float32), longest, axis=1),
            kept_set_sizes=np.maximum(_padded(rows, longest, "kept"), 0),
            **arrays,
        )
    except ValueError as error:
        return None, f"clip states are not shown: {str(error).splitlines()[0]}"
    gate, clipped = values.gate.numpy(), values.clipped.numpy()
    if not _agrees(run, step, gate[mask], clipped[mask]):
        return None, "clip states are not shown for steps where they depend on earlier ones"
    states = np.select(
        [values.weight.numpy() == 0, values.newly_clipped.numpy(), clipped, gate],
        [DROPPED, NEWLY_CLIPPED, CLIPPED, GATED],
        INSIDE,
    )
    return [states[position, : len(row["token_ids"])] for position, row in enumerate(rows)], ""


def _padded(rows: Sequence[dict[str, Any]], longest: int, name: str) -> Array:
    padded = np.zeros((len(rows), longest), rows[0][name].dtype)
    for position, row in enumerate(rows):
        padded[position, : len(row[name])] = row[name]
    return padded.astype(np.float32) if padded.dtype.kind == "f" else padded


def _agrees(run: RecordedRun, step: int, gate: Array, clipped: Array) -> bool:
    rows = run.mismatch().filter(pl.col("step") == step, pl.col("part") == "total", pl.col("scope") == "all")
    if rows.height != 1 or not {"gate_rate", "clip_fraction"} <= set(rows.columns):
        return False
    differences = gate.mean() - rows["gate_rate"].item(), clipped.mean() - rows["clip_fraction"].item()
    return all(abs(difference) <= _TOLERANCE for difference in differences)
