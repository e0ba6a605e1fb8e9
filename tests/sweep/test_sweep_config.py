"""A sweep file stands for its cells: each shipped one is loaded, and a wrong one gets a sentence."""

from pathlib import Path

import pytest
import yaml

from agent_rl.sweep.config import SweepConfig, cell_config, cells, flow, read_sweep
from tests.configs import QUICKSTART

SWEEPS = sorted((QUICKSTART.parent / "sweeps").glob("*.yaml"))


def written(folder: Path, **keys: object) -> tuple[SweepConfig, Path]:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": str(QUICKSTART), "seeds": [0, 1], **keys}))
    return read_sweep(path), path


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_shipped_sweep_is_made_of_valid_runs(path: Path, tmp_path: Path) -> None:
    sweep = read_sweep(path)
    every = cells(sweep, path, tmp_path)
    assert len(every) == len(sweep.seeds) * len(sweep.arms) * len(sweep.places())
    assert len({cell.directory for cell in every}) == len(every)
    for cell in every[: len(every) // len(sweep.seeds)]:
        assert cell_config(cell).seed == sweep.seeds[0]


def test_the_clip_sweep_has_the_lag_and_the_clips_it_says(tmp_path: Path) -> None:
    path = QUICKSTART.parent / "sweeps" / "clip_at_lag_8.yaml"
    configs = {c.variant.arm: cell_config(c) for c in cells(read_sweep(path), path, tmp_path)[:10]}
    assert {config.pipeline.exact_lag for config in configs.values()} == {8}
    assert {config.objective.ratio.level for arm, config in configs.items() if "gspo" in arm} == {"sequence"}
    assert configs["sat_turn_min"].objective.clip.turns.mode == "min"
    assert (configs["no_clip"].objective.clip.type, configs["matched"].objective.clip.type) == ("none", "matched")


def test_the_grid_times_the_arms_times_the_seeds(tmp_path: Path) -> None:
    arms = {"a": {}, "b": {"set": {"num_steps": 7}}}
    sweep, path = written(tmp_path, arms=arms, grid={"pipeline.exact_lag": [0, 4]}, set={"num_steps": 3})
    every = cells(sweep, path, tmp_path)
    found = [(c.variant.name, c.seed, cell_config(c).pipeline.exact_lag, cell_config(c).num_steps) for c in every]
    one_seed = [("a exact_lag=0", 0, 3), ("b exact_lag=0", 0, 7), ("a exact_lag=4", 4, 3), ("b exact_lag=4", 4, 7)]
    assert found == [(name, seed, lag, steps) for seed in (0, 1) for name, lag, steps in one_seed]
    assert every[3].directory == tmp_path / "b" / "exact_lag=4" / "seed-0"


def test_a_matched_arm_reads_the_next_seeds_run_at_the_same_place(tmp_path: Path) -> None:
    arms = {
        "sat": {"method": "sat_grpo"},
        "matched": {"method": "matched", "set": {"objective.clip": {"type": "matched"}}, "schedule_of": "sat"},
    }
    sweep, path = written(tmp_path, arms=arms, grid={"pipeline.exact_lag": [1, 2]})
    matched = [cell for cell in cells(sweep, path, tmp_path) if cell.variant.arm == "matched"]
    assert [cell.after for cell in matched] == [
        tmp_path / "sat" / f"exact_lag={lag}" / f"seed-{seed}" for seed in (1, 0) for lag in (1, 2)
    ]
    assert f"objective.clip.schedule={matched[0].after}" in matched[0].arguments


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"seeds": [1, 1]}, "one comes twice"),
        ({"grid": {"num_steps": []}}, "grid.num_steps is an empty list"),
        ({"baseline": "ppo"}, "baseline 'ppo' is neither an arm nor a place; known: base"),
        ({"arms": {"a/b": {}}}, "the arm 'a/b' names a folder"),
        ({"arms": {"m": {"schedule_of": "sat"}}}, "takes the schedule of 'sat', which is no arm"),
        ({"arms": {"m": {"schedule_of": "m"}}}, "takes the schedule of 'm', which takes one itself; name a SAT arm"),
        ({"sedes": [1]}, "unknown key 'sedes'"),
    ],
)
def test_a_wrong_sweep_gets_a_sentence(keys: dict[str, object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        written(tmp_path, **keys)


def test_a_key_that_no_run_has_is_named_with_its_cell(tmp_path: Path) -> None:
    sweep, path = written(tmp_path, grid={"pipeline.exact_lags": [1]})
    with pytest.raises(ValueError, match=r"exact_lags=1 seed 0: .*did you mean 'exact_lag'"):
        cell_config(cells(sweep, path, tmp_path)[0])


def test_values_survive_as_overrides() -> None:
    values = [1, 1e-5, 0.5, True, None, "a: b", [1, 2], {"type": "sat", "alpha": 0.9}]
    assert [yaml.safe_load(flow(value)) for value in values] == values
