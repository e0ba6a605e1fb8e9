"""An evaluation as a directory: what was asked, who answered, and each sample. Two of them compared."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from agent_rl import facts
from agent_rl.analysis.scores import Score, per_problem, score
from agent_rl.config import RunConfig

RESULTS, RECORD = "results.parquet", "evaluation.json"


@dataclass(frozen=True)
class EvaluationRecord:
    """`settings` is all that must be the same for two policies to be comparable; `rows` are `facts.EVALUATION`."""

    model: str
    policy_version: int
    settings: dict[str, Any]
    rows: pl.DataFrame

    @property
    def scores(self) -> list[Score]:
        return [score(name, values) for name, values in per_problem(self.rows).items()]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Prompts, sampler, budget, tools, scorer and seed of an evaluation with `config`, as one flat mapping.

    How fast it ran (workers, concurrency, the engine's batch sizes) and where (the tool server) is no setting.
    """
    sampling = config.eval.sampling or config.rollout.sampling
    rollout = config.rollout.model_dump(mode="json")
    budget = ("max_tool_turn", "max_turn_tokens", "max_episode_tokens", "max_tool_output_tokens", "deadline_s")
    return {
        "prompts": config.eval.model_dump(mode="json")["prompts"],
        "num_prompts": config.eval.num_prompts,
        "num_samples": config.eval.num_samples,
        "seed": config.seed,
        **{f"sampling.{key}": value for key, value in sampling.model_dump(mode="json").items()},
        **{key: rollout[key] for key in (*budget, "tools", "tool_format")},
        "engine": rollout["engine"]["type"],
        "reward": config.model_dump(mode="json")["reward"],
        "sandbox.limits": config.sandbox.server.limits.model_dump(mode="json"),
    }


def write_record(path: Path, config: RunConfig, policy_version: int, rows: list[dict[str, Any]]) -> EvaluationRecord:
    """Write an evaluation into the new directory `path`: `results.parquet` and `evaluation.json` with the scores."""
    path.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=facts.EVALUATION), path / RESULTS, compression="zstd")
    frame = pl.read_parquet(path / RESULTS)
    record = EvaluationRecord(config.model.path, policy_version, settings_of(config), frame)
    described = {
        "model": record.model,
        "policy_version": policy_version,
        "num_failed": frame["failure"].count(),
        "scores": [asdict(each) for each in record.scores],
        "settings": record.settings,
    }
    (path / RECORD).write_text(json.dumps(described, indent=2) + "\n")
    return record


def read_record(path: Path) -> EvaluationRecord:
    """An evaluation from its directory. Raises `ValueError` if there is none."""
    if not (path / RECORD).is_file() or not (path / RESULTS).is_file():
        raise ValueError(f"no evaluation in {str(path)!r}; name a directory that `agent-rl eval` wrote")
    described = json.loads((path / RECORD).read_text())
    frame = pl.read_parquet(path / RESULTS)
    return EvaluationRecord(described["model"], described["policy_version"], described["settings"], frame)


def differing_settings(a: EvaluationRecord, b: EvaluationRecord) -> dict[str, tuple[Any, Any]]:
    """The settings in which two evaluations differ: (value in `a`, value in `b`)."""
    keys = sorted(a.settings.keys() | b.settings.keys())
    return {k: (a.settings.get(k), b.settings.get(k)) for k in keys if a.settings.get(k) != b.settings.get(k)}


def compare(a: EvaluationRecord, b: EvaluationRecord) -> pl.DataFrame:
    """Metrics that both have, over the problems that both could run: a, b, b - a and its paired 95 % interval.

    Paired: each resample draws problems, and both policies' numbers on them. Columns: metric, a, b, difference,
    low, high, problems. Raises `ValueError` if they share no problem or no metric.
    """
    left, right = (record.rows.filter(~pl.col("problem").is_in(_broken(a, b))) for record in (a, b))
    keys = ["problem", "messages", "answer"]
    shared = left.select(keys).unique().join(right.select(keys).unique(), on=keys)
    if shared.is_empty():
        raise ValueError("the two evaluations have no problem in common; evaluate both on the same prompts")
    first, second = (per_problem(rows.join(shared, on=keys)) for rows in (left, right))
    metrics = [name for name in first if name in second]
    if not metrics:
        raise ValueError("the two evaluations have no metric in common; evaluate both with one eval.num_samples")
    rows = []
    for name in metrics:
        paired = score(name, np.asarray(second[name]) - np.asarray(first[name]))
        means = {"a": float(first[name].mean()), "b": float(second[name].mean())}
        rows.append(
            {"metric": name, **means, "difference": paired.value, "low": paired.low, "high": paired.high}
            | {"problems": shared.height}
        )
    return pl.DataFrame(rows)


def _broken(*records: EvaluationRecord) -> list[int]:
    """Problems with an episode that the infrastructure broke in one of the evaluations."""
    return sorted({p for r in records for p in r.rows.filter(pl.col("failure").is_not_null())["problem"].to_list()})
