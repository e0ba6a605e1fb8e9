"""An evaluation as a directory: what was asked, who answered, and each sample. Two of them compared."""

import errno
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from agent_rl import facts
from agent_rl.analysis.scores import Interval, bootstrap_interval, per_problem
from agent_rl.config import RunConfig

RESULTS, RECORD = "results.parquet", "evaluation.json"


@dataclass(frozen=True)
class EvaluationRecord:
    """`settings` is all that must be the same for two policies to be comparable; `rows` are `facts.EVALUATION`.

    `server`: the `url` and `weight_version` of a running server, if one was evaluated as it was.
    """

    model: str
    policy_version: int
    settings: dict[str, Any]
    rows: pl.DataFrame
    server: dict[str, str] | None = None

    @property
    def policy(self) -> str:
        """Who was evaluated, in words."""
        if self.server is None:
            return f"{self.model}, policy version {self.policy_version}"
        return f"{self.model}, served at {self.server['url']} as weight version {self.server['weight_version']!r}"

    @property
    def scores(self) -> list[Interval]:
        return [bootstrap_interval(name, values) for name, values in per_problem(self.rows).items()]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Prompts, sampler, budget, tools, scorer and seed of an evaluation with `config`, as one flat mapping.

    How fast it ran (workers, concurrency, the engine's batch sizes) and where (the tool server) is no setting.
    """
    sampling = config.eval.sampling or config.rollout.sampling
    rollout = config.rollout.model_dump(mode="json")
    tokens = ("max_turn_tokens", "max_episode_tokens", "max_tool_output_tokens")
    budget = ("max_tool_turn", "max_calls_per_turn", *tokens, "deadline_s")
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


def record_of(
    config: RunConfig,
    policy_version: int,
    rows: list[dict[str, Any]],
    model: str | None = None,
    server: dict[str, str] | None = None,
) -> EvaluationRecord:
    """An evaluation with `config`. `model`: what was evaluated, where that is not the config's `model.path`."""
    frame = facts.evaluation_frame(rows)
    return EvaluationRecord(model or config.model.path, policy_version, settings_of(config), frame, server)


def write_record(path: Path, record: EvaluationRecord) -> None:
    """Write an evaluation into the new directory `path`: `results.parquet` and `evaluation.json` with the scores.

    An evaluation that cannot be written leaves nothing behind. Raises `OSError`, with `path`, on a full disk.
    """
    path.mkdir(parents=True)
    try:
        pq.write_table(record.rows.to_arrow().cast(facts.EVALUATION), path / RESULTS, compression="zstd")
        (path / RECORD).write_text(json.dumps(_described(record), indent=2) + "\n")
    except BaseException as error:
        shutil.rmtree(path)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error  # pyarrow names no file
        raise


def _described(record: EvaluationRecord) -> dict[str, Any]:
    return {
        "model": record.model,
        "policy_version": record.policy_version,
        **({"server": record.server} if record.server else {}),
        "num_failed": record.rows["failure"].count(),
        "scores": [asdict(each) for each in record.scores],
        "settings": record.settings,
    }


def read_record(path: Path) -> EvaluationRecord:
    """An evaluation from its directory. Raises `ValueError` if there is none."""
    if not (path / RECORD).is_file() or not (path / RESULTS).is_file():
        raise ValueError(f"no evaluation in {str(path)!r}; name a directory that `agent-rl eval` wrote")
    described = json.loads((path / RECORD).read_text())
    frame = pl.read_parquet(path / RESULTS)
    return EvaluationRecord(
        described["model"], described["policy_version"], described["settings"], frame, described.get("server")
    )


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
        paired = bootstrap_interval(name, np.asarray(second[name]) - np.asarray(first[name]))
        means = {"a": float(first[name].mean()), "b": float(second[name].mean())}
        rows.append(
            {"metric": name, **means, "difference": paired.value, "low": paired.low, "high": paired.high}
            | {"problems": shared.height}
        )
    return pl.DataFrame(rows)


def _broken(*records: EvaluationRecord) -> list[int]:
    """Problems with an episode that the infrastructure broke in one of the evaluations."""
    return sorted({p for r in records for p in r.rows.filter(pl.col("failure").is_not_null())["problem"].to_list()})
