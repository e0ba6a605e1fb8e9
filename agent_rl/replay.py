"""Offline replay: one recorded batch through many objectives, side by side, from one policy.

Of a run: the batch of a step, from the checkpoint that the step trained from, with the gradient of the model's
parameters. Of a Parquet file, which another framework may have written: the gradient of the log-probs, since a
file has no model. Nothing is trained and nothing is written to the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
from torch import Tensor

from agent_rl.dump import Dump
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.errors import ObjectiveError
from agent_rl.objective.loss import Objective
from agent_rl.objective.methods import lay_over, method_names
from agent_rl.pipeline.run_directory import checkpoint_step, list_checkpoints, load_run_config
from agent_rl.recorded_batch import Candidate, Measured, RecordedBatch
from agent_rl.settings import check

Methods = str | Mapping[str, ObjectiveConfig]
"""`all`; names of methods with commas between; or objectives, each by a name that the caller chose."""

BASELINE_METHOD = "grpo"
"""The method whose gradient the others are compared with; always evaluated."""
OWN = "own"
"""The name of the run's own objective, beside those of methods."""


@dataclass(frozen=True, eq=False)
class Replay:
    """What every objective made of one batch.

    table: one row a method, GRPO first: method, loss, gradient_norm, cosine (of the gradient to GRPO's; NaN where
    one of them is 0), gate_rate, dropped_fraction, clip_fraction, eps_low, eps_high (infinite without a clip),
    gate_rate_turn_<k> and clip_fraction_turn_<k>, and `skipped`: why a method could not be evaluated, with every
    number null, else null. notes: what to know of a method's row. gradient_of: what the gradient is taken to.
    """

    table: pl.DataFrame
    gradient_of: str
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def skipped(self) -> dict[str, str]:
        """The methods that could not be evaluated, and why."""
        return dict(self.table.filter(pl.col("skipped").is_not_null()).select("method", "skipped").iter_rows())

    def overall(self) -> pl.DataFrame:
        """The evaluated methods, without the columns by turn."""
        return self._evaluated().select(name for name in self.table.columns if "_turn_" not in name).drop("skipped")

    def by_turn(self, figure: str) -> pl.DataFrame:
        """`gate_rate` or `clip_fraction` of the evaluated methods: columns method, all, and one a turn."""
        prefix = f"{figure}_turn_"
        names = {figure: "all"}
        names |= {name: name.removeprefix(prefix) for name in self.table.columns if name.startswith(prefix)}
        return self._evaluated().select("method", *names).rename(names)

    def _evaluated(self) -> pl.DataFrame:
        return self.table.filter(pl.col("skipped").is_null())


def replay_run(run: Path, step: int, methods: Methods = "all") -> Replay:
    """Batch `step` of a run through `methods`, at the weights that step `step` trained from.

    Each is what `objective` would be under `--method`: the run's KL stays, and routing is replayed for the methods
    that do so. `all` includes `own`, the run's objective. Objectives by a name of one's own replay routing if the
    run does. Raises `ValueError` where the checkpoint or the batch is not there.
    """
    config = load_run_config(run)
    candidates = _candidates(methods, Candidate(config.objective, config.routing_replay))
    batch = RecordedBatch(run, step, config)
    learned = {name: c for name, c in candidates.items() if Objective(c.objective).clip.learns}
    notes = {name: _FORGOT for name, c in learned.items() if c.objective.clip != config.objective.clip}
    return Replay(_table(candidates, batch.measure, batch.missing, batch.turn_ids), "the model's parameters", notes)


def replay_file(path: Path, methods: Methods = "all") -> Replay:
    """A Parquet file as `agent_rl.dump` describes, through `methods`; the gradient is that of the log-probs.

    Raises `ValueError` on missing columns and on rows whose lists disagree.
    """
    candidates = _candidates(methods, None)
    batch = Dump(path)
    notes = {name: _FORGOT for name, c in candidates.items() if Objective(c.objective).clip.learns}

    def measure(candidate: Candidate) -> Measured:
        values, mask = batch.evaluate(candidate.objective), batch.mask
        return Measured(
            values.loss, values.grad_logprobs[mask], values.metrics, values.gate[mask], values.clipped[mask]
        )

    def missing(candidate: Candidate) -> str | None:
        if candidate.routing_replay:
            return f"replays routing, and {path} has log-probs but no model to route"
        return batch.missing(candidate.objective)

    return Replay(_table(candidates, measure, missing, batch.turn_ids), "the log-probs", notes)


def replay_batch(target: Path, step: int | None, methods: Methods = "all") -> Replay:
    """`replay_run` of a directory, `replay_file` of anything else."""
    if not target.is_dir():
        if step is not None:
            raise ValueError(f"{target} is no run, and a file is one batch; leave out --step")
        return replay_file(target, methods)
    if step is None:
        known = ", ".join(str(checkpoint_step(path)) for path in list_checkpoints(target))
        raise ValueError(f"say with --step which batch of {target}; its checkpoints: {known or 'none'}")
    return replay_run(target, step, methods)


def write_csv(replayed: Replay, path: Path) -> None:
    """The whole table, skipped methods and columns by turn included."""
    replayed.table.write_csv(path)


_FORGOT = "learns from earlier steps and starts here without them"


def _candidates(methods: Methods, own: Candidate | None) -> dict[str, Candidate]:
    """The candidates by name, the baseline first. Raises `ObjectiveError` (bad_method) on an unknown name."""
    run = {} if own is None else {"objective": own.objective.model_dump(mode="json")}

    def laid_over(name: str) -> Candidate:
        keys = lay_over(run, name)
        return Candidate(check(ObjectiveConfig, keys["objective"], f"method {name}"), keys["routing_replay"])

    candidates = {BASELINE_METHOD: laid_over(BASELINE_METHOD)}
    if not isinstance(methods, str):
        replays = own is not None and own.routing_replay
        return candidates | {name: Candidate(objective, replays) for name, objective in methods.items()}
    names = [OWN] * (own is not None) + method_names() if methods == "all" else methods.split(",")
    for name in (name.strip() for name in names):
        candidates[name] = own if name == OWN and own is not None else laid_over(name)
    return candidates


def _table(
    candidates: Mapping[str, Candidate],
    measure: Callable[[Candidate], Measured],
    missing: Callable[[Candidate], str | None],
    turn_ids: Tensor,
) -> pl.DataFrame:
    """One row a candidate. At most two gradients are held at once: each is as large as the model."""
    baseline = measure(candidates[BASELINE_METHOD])
    rows = []
    for name, candidate in candidates.items():
        reason, measured = missing(candidate), None
        try:
            if name == BASELINE_METHOD:
                measured = baseline
            elif reason is None:
                measured = measure(candidate)
        except ObjectiveError as error:
            reason = str(error)
        figures = {} if measured is None else _figures(measured, baseline.gradient, turn_ids)
        rows.append({"method": name, **figures, "skipped": reason})
    table = pl.DataFrame(rows, infer_schema_length=None)
    return table.select(pl.exclude("skipped"), pl.col("skipped").cast(pl.String))


def _figures(measured: Measured, baseline: Tensor, turn_ids: Tensor) -> dict[str, float | None]:
    means = ("gate_rate", "dropped_fraction", "clip_fraction")
    row: dict[str, float | None] = {
        "loss": measured.loss,
        "gradient_norm": float(measured.gradient.double().norm()),
        "cosine": _cosine(measured.gradient, baseline),
        **{name: measured.metrics[name] for name in means},
        **{name: measured.metrics.get(name, float("inf")) for name in ("eps_low", "eps_high")},
    }
    for name, values in (("gate_rate", measured.gate), ("clip_fraction", measured.clipped)):
        for turn in sorted(set(turn_ids.tolist()) - {-1}):
            row[f"{name}_turn_{turn}"] = float(values[turn_ids == turn].double().mean())
    return row


def _cosine(a: Tensor, b: Tensor) -> float:
    """The cosine between `a` and `b`; NaN where one of them is 0 and has no direction."""
    x, y = a.double(), b.double()
    return float(x @ y / (x.norm() * y.norm()))
