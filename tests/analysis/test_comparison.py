"""Sweep tables on worked numbers."""

import json
from pathlib import Path

import pytest

from agent_rl.analysis.comparison import collapse, per_run, read_run, seeds_needed, summary


def rows(scores: list[float], **last: object) -> list[dict[str, object]]:
    steps = [{"step": i, "wall_s": 2.0, "eval_avg": s, "mismatch_mean_abs": 0.01} for i, s in enumerate(scores)]
    return [*steps[:-1], {**steps[-1], **last}]


def finished(folder: Path, arm: str, seed: int, scores: list[float], place: str = "") -> object:
    run = folder / arm / place / f"{seed}"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(scores)))
    return read_run(run, arm, place, f"{arm} {place}".strip(), seed)


def test_means_errors_and_paired_differences(tmp_path: Path) -> None:
    scores = {"ppo": [0.5, 0.7, 0.9], "sat": [0.6, 0.7, 0.8]}
    runs = [finished(tmp_path, arm, seed, [0.95, s]) for arm, ends in scores.items() for seed, s in enumerate(ends)]
    table = summary(per_run(runs), "ppo", effect=0.1).to_dicts()
    assert [row["variant"] for row in table] == ["ppo", "sat"]
    assert table[0]["last"] == pytest.approx(0.7)
    assert table[0]["last_se"] == pytest.approx(0.2 / 3**0.5)
    assert table[0]["best"] == pytest.approx(0.95)
    assert table[0]["difference"] is None
    # by seed: +0.1, 0, -0.1
    assert table[1]["difference"] == pytest.approx(0.0, abs=1e-12)
    assert table[1]["difference_se"] == pytest.approx(0.1 / 3**0.5)
    assert (table[1]["pairs"], table[1]["seeds_needed"]) == (3, 10)


def test_a_pair_needs_both_seeds_and_one_seed_has_no_error(tmp_path: Path) -> None:
    runs = [finished(tmp_path, "ppo", 0, [0.4]), finished(tmp_path, "sat", 0, [0.5]), finished(tmp_path, "sat", 1, [1])]
    sat = summary(per_run(runs), "ppo", effect=0.1).to_dicts()[1]
    assert (sat["pairs"], sat["difference"], sat["difference_se"]) == (1, pytest.approx(0.1), None)
    assert sat["last"] == pytest.approx(0.75)


def test_a_baseline_arm_is_taken_at_the_same_place_and_a_place_within_the_arm(tmp_path: Path) -> None:
    ends = {("ppo", "lag=0"): 0.9, ("ppo", "lag=8"): 0.5, ("sat", "lag=0"): 0.8, ("sat", "lag=8"): 0.7}
    runs = per_run([finished(tmp_path, arm, 0, [end], place) for (arm, place), end in ends.items()])
    to_arm = {row["variant"]: row["difference"] for row in summary(runs, "ppo", 0.1).to_dicts()}
    assert to_arm == {
        "ppo lag=0": None,
        "ppo lag=8": None,
        "sat lag=0": pytest.approx(-0.1),
        "sat lag=8": pytest.approx(0.2),
    }
    to_place = {row["variant"]: row["difference"] for row in summary(runs, "lag=0", 0.1).to_dicts()}
    assert to_place == {
        "ppo lag=0": None,
        "ppo lag=8": pytest.approx(-0.4),
        "sat lag=0": None,
        "sat lag=8": pytest.approx(-0.1),
    }


def test_collapse_by_evaluation_by_mismatch_and_by_loss() -> None:
    assert collapse(rows([0.5, 0.9, 0.9, 0.8])) is None
    assert collapse(rows([0.2, 0.9, 0.3, 0.2, 0.1])) == "eval at 2"
    assert collapse(rows([0.5, 0.6], skipped_nonfinite=1.0)) == "loss at 1"
    wild = [{**row, "mismatch_mean_abs": 0.01 if i < 20 else 0.2} for i, row in enumerate(rows([0.5] * 30))]
    assert collapse(wild) == "mismatch at 20"
    assert collapse([*rows([0.5]), {**rows([0.5, 0.6])[1], "loss": None}]) == "loss at 1"
    idle = [{**row, "mismatch_mean_abs": None, "skipped_empty": 1.0} for row in rows([0.5] * 10)]
    calm = [{**row, "mismatch_mean_abs": 0.01} for row in rows([0.5] * 40)]
    assert collapse([*calm[:20], *idle, *calm[20:]]) is None, "a step without spread has no mismatch"
    halved = [{**row, "skipped_empty": 1.0, "num_updates": 2.0} for row in wild]
    assert collapse(halved) == "mismatch at 20", "one of two mini-batches had something to train on"


def test_runs_without_evaluations_are_listed_without_scores(tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "wall_s": 1.0, "eval_avg": None}) + "\n")
    table = summary(per_run([read_run(run, "a", "", "a", 0)]), None, 0.1)
    assert table.select("last", "best", "collapsed").row(0) == (None, None, 0)


def test_seeds_needed_by_hand() -> None:
    # (1.95996 + 0.84162)^2 = 7.8489
    assert seeds_needed(0.1, 0.1) == 8 + 2
    assert seeds_needed(0.2, 0.05) == 126 + 2
    assert seeds_needed(0.0, 0.05) == 3
