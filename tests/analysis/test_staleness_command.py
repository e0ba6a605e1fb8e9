"""`agent-rl staleness` on figures, a config and a real run."""

from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from agent_rl import facts
from agent_rl.analysis.measured_lag import measured_lag
from agent_rl.analysis.recorded import RecordedRun
from agent_rl.cli import app
from agent_rl.pipeline.staleness import configured
from tests.configs import QUICKSTART, quickstart


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["staleness", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_given_figures_alone() -> None:
    figures = ("--rho", "1.07", "--concurrency", "128", "--batch", "128", "--queue", "256", "--tail", "1.44")
    assert "1.35" in run(*figures, "--full", "drop")
    assert "1.9" in run(*figures, "--full", "drop")
    assert "3.44" in run(*figures)  # 1.44 + 2: rollouts wait
    failed = CliRunner().invoke(app, ["staleness", "--rho", "0.5"])
    assert failed.exit_code == 2


def test_a_config_gives_a_table_over_rho_and_keys_for_a_target() -> None:
    assert run(str(QUICKSTART)).count("predicted") == 6
    advice = run(str(QUICKSTART), "--rho", "1.5", "--tail", "1.2", "--target", "1.5")
    assert "rollout.max_concurrent_episodes=71" in advice  # floor(1.5 / (1.2/128 + 1.5/128))
    assert configured(quickstart()) == (128, 128, 128)


def test_fully_async_holds_what_lag_and_groups_allow() -> None:
    def held(keys: str, tail: float = 1.0) -> tuple[float, float, float]:
        return configured(quickstart(f"pipeline={{type: fully_async, {keys}}}"), tail)

    assert held("max_lag: 2") == (128, 128, 128)
    assert held("max_lag: 2", tail=1.5) == (128, 128, 64)
    assert held("max_lag: 2, max_groups: 16") == (128, 128, 0)
    assert held("max_lag: 1, max_groups: 16", tail=2.0) == (64, 128, 0)
    assert held("max_lag: 0") == (0, 128, 0)


def fact(group: int, episode: int, sampled: int, first: int, last: int, seconds: float) -> dict[str, object]:
    turns = [{"turn_id": 0, "generate_s": seconds, "tool_s": 0.25}]
    return {
        "group_id": group,
        "episode_id": episode,
        "num_sampled": sampled,
        "min_policy_version": first,
        "max_policy_version": last,
        "turns": turns,
    }


@pytest.mark.parametrize(("trained_at", "in_queue"), [([3], 1.0), ([6, 7], 4.0)], ids=["one update", "two a batch"])
def test_measured_figures_from_worked_rows(tmp_path: Path, trained_at: list[int], in_queue: float) -> None:
    rows = [fact(0, 0, 10, 1, 1, 0.5), fact(0, 1, 30, 0, 2, 1.5), fact(1, 2, 20, 2, 2, 1.0), fact(1, 3, 20, 1, 2, 1.0)]
    facts.write_part(tmp_path / "rollout_facts.parquet", 0, rows, facts.ROLLOUT_FACTS)
    trained = [
        {"step": 3, "group_id": g, "episode_id": e, "fate": "trained", "trained_at": trained_at}
        for g, e in ((0, 0), (0, 1), (1, 2), (1, 3))
    ]
    facts.write_part(tmp_path / "training_facts.parquet", 3, trained, facts.TRAINING_FACTS)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 3, "train_s": 2.0, "publish_s": 0.5, "lag_mean": 1.5, "trained_tokens": 80}\n'
    )
    found = measured_lag(RecordedRun(tmp_path))
    assert found.tail == pytest.approx(25 / 20)
    assert found.response_s == pytest.approx(1.25)
    assert (found.train_s, found.batch, found.token_lag) == (2.5, 4.0, 1.5)
    assert found.pre_queue == pytest.approx((1 + 2 + 0 + 1) / 4)
    assert found.in_queue == pytest.approx(in_queue)
    assert found.rho(concurrency=2) == pytest.approx((2 / 1.25) / (4 / 2.5))


def test_facts_of_another_version_are_one_sentence(tmp_path: Path) -> None:
    for table, columns in (("rollout_facts", {"group_id": [0]}), ("training_facts", {"step": [3], "group_id": [0]})):
        (tmp_path / f"{table}.parquet").mkdir()
        pl.DataFrame(columns).write_parquet(tmp_path / f"{table}.parquet" / "part-000003.parquet")
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "train_s": 2.0}\n')
    with pytest.raises(ValueError, match=r"has no .*trained_at.* it was recorded by another version of agent-rl"):
        measured_lag(RecordedRun(tmp_path))


def test_a_real_run_stands_beside_its_prediction(recorded: Path) -> None:
    output = run(str(recorded), "--first-step", "2")
    assert "measured" in output
    assert "the lag is min(step, 2) batches" in output
    found = measured_lag(RecordedRun(recorded), first_step=2)
    assert (found.pre_queue, found.in_queue, found.token_lag) == (0.0, 2.0, 2.0)
    assert found.batch == 16
    assert found.tail >= 1
