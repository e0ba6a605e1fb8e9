"""Replay: the figures are those of training, other frameworks' batches can be brought, nothing is skipped silently."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agent_rl import facts
from agent_rl.cli import app
from agent_rl.config import RunConfig, model_directory
from agent_rl.objective import evaluate
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.methods import method, method_names
from agent_rl.pipeline.figures import dropped_rows, training_rows
from agent_rl.pipeline.run_directory import RunDirectory
from agent_rl.pipeline.state import RunState
from agent_rl.records import Episode, Prompt, Trajectory
from agent_rl.replay import OWN, Methods, Replay, replay_batch, replay_file, replay_run
from agent_rl.trainer.engines.torch import TorchEngine
from tests.configs import quickstart
from tests.trajectories import random_trajectory

MODEL = str(model_directory("builtin:tiny-qwen3"))
NEAR = pytest.approx
STEP = 3
PROXIMAL = {"grpo_tis", "gspo_tis", "icepop", "kpop"}
R3 = {name for name in method_names() if name.endswith("_r3")}


def near_policy(engine: TorchEngine, count: int, experts: tuple[int, int, int] | None = None) -> list[Trajectory]:
    """Groups of two, one right and one wrong, with behaviour log-probs about 0.1 from the engine's own."""
    rng = np.random.default_rng(0)
    drawn = [random_trajectory(rng, i, turns=1 + i % 4, experts=experts) for i in range(count)]
    batch = [replace(t, reward=float(i % 2)) for i, t in enumerate(drawn)]
    noise = [rng.normal(0, 0.1, len(t)).astype(np.float32) for t in batch]
    found = zip(batch, engine.logprobs(batch), noise, strict=True)
    return [replace(t, behavior_logprobs=np.minimum(values + e, 0)) for t, values, e in found]


def make_run(
    path: Path,
    *overrides: str,
    trained: bool = True,
    warm: bool = False,
    experts: tuple[int, int, int] | None = None,
) -> tuple[RunConfig, list[Trajectory], TorchEngine]:
    """A run that stands at step 3: group 0 was sampled and dropped, the others were trained, or are queued.

    With `warm` its policy is a step away from the initial one.
    """
    config = quickstart(*overrides)
    engine = TorchEngine(config.trainer, str(model_directory(config.model.path)), config.objective)
    if warm:
        engine.train(near_policy(engine, 10), STEP - 1)
    batch = near_policy(engine, 10, experts)
    directory = RunDirectory(path, config)
    prompt = Prompt(0, ({"role": "user", "content": "1+1"},), "2")
    episodes = [Episode(prompt, (), trajectory) for trajectory in batch]
    directory.write_rollouts(STEP, episodes)
    kept = batch[2:]
    checkpoint = directory.checkpoint(STEP)
    engine.save(checkpoint)
    RunState(step=STEP, queue={} if trained else {STEP: [1, 2, 3, 4]}).save(checkpoint)
    if trained:
        result = continued(config, checkpoint, config.objective).train(kept, STEP)
        rows = [*training_rows(STEP, kept, result), *dropped_rows(STEP, batch, {0: "SessionLost"})]
        directory.write_training(STEP, rows, result.mismatch)
    directory.close()
    return config, kept, engine


def continued(config: RunConfig, checkpoint: Path, objective: ObjectiveConfig) -> TorchEngine:
    """The run's trainer as it continues from a checkpoint, with an objective."""
    engine = TorchEngine(config.trainer, str(model_directory(config.model.path)), objective)
    engine.load(checkpoint)
    return engine


def row(replayed: Replay, name: str) -> dict[str, float]:
    return replayed.table.row(by_predicate=pl.col("method") == name, named=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    make_run(path)
    return path


@pytest.fixture(scope="module")
def replayed(run: Path) -> Replay:
    return replay_run(run, STEP)


def test_every_method_has_a_row_and_the_skipped_ones_a_reason(replayed: Replay) -> None:
    assert replayed.table["method"].to_list()[:2] == ["grpo", OWN]
    assert set(replayed.table["method"]) == {OWN, *method_names()}
    assert set(replayed.skipped) == PROXIMAL | R3
    assert {replayed.skipped[name] for name in R3} == {
        "replays routing, and the run recorded none: it was made without routing_replay"
    }
    assert replayed.skipped["kpop"] == "needs proximal_logprobs, which the training facts of step 3 do not hold for all"
    assert set(replayed.notes) == {"sat_ema_cap", "sat_previous_step"}
    evaluated = replayed.overall()
    assert evaluated.height == replayed.table.height - len(PROXIMAL | R3)
    assert evaluated.select((pl.col("gradient_norm") > 0).all()).item()
    assert evaluated.select(pl.col("cosine").is_between(-1, 1 + 1e-9).all()).item()


def test_grpo_is_its_own_direction_and_the_others_are_not(replayed: Replay) -> None:
    assert row(replayed, "grpo")["cosine"] == NEAR(1, abs=1e-6)
    assert 0.9 < row(replayed, "gspo")["cosine"] < 1 - 1e-4
    assert row(replayed, "sat_grpo")["cosine"] < 1 - 1e-6
    assert row(replayed, "sat_grpo")["eps_low"] < row(replayed, "grpo")["eps_low"] == NEAR(0.2)
    assert row(replayed, "no_clip")["eps_high"] == float("inf")
    assert 0 < row(replayed, "seqclip")["dropped_fraction"] < 1


@pytest.mark.parametrize("overrides", [(), ("rollout.max_episode_tokens=48", "trainer.max_tokens_per_microbatch=48")])
def test_the_gradient_is_the_one_that_training_clips(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Also with several micro-batches, with a KL to the initial policy, and for a state that the run brings."""
    kl = ("objective.kl.coefficient=0.1", "objective.clip.scope=previous_step")
    config, kept, engine = make_run(tmp_path, *overrides, *kl, warm=True)
    found = replay_run(tmp_path, STEP, f"{OWN},sat_grpo")
    metrics = engine.train(kept, STEP).metrics
    assert (metrics["num_microbatches"] > 2) == bool(overrides)
    assert row(found, OWN)["gradient_norm"] == NEAR(metrics["grad_norm"], rel=1e-5)
    for name in ("loss", "gate_rate", "clip_fraction", "eps_low"):
        assert row(found, OWN)[name] == NEAR(metrics[name], rel=1e-5, abs=1e-7)
    as_method = config.objective.model_copy(update={"clip": method("sat_grpo").clip})
    metrics = continued(config, tmp_path / "checkpoints" / "step-000003", as_method).train(kept, STEP).metrics
    assert row(found, "sat_grpo")["gradient_norm"] == NEAR(metrics["grad_norm"], rel=1e-5)
    assert set(found.notes) == set()


def test_the_state_of_the_checkpoint_is_used(tmp_path: Path) -> None:
    """The first step of scope previous_step gates nothing; a checkpoint after it knows its quantile."""
    config = quickstart("objective.clip.scope=previous_step")
    engine = TorchEngine(config.trainer, MODEL, config.objective)
    engine.train(near_policy(engine, 10), 0)
    make_run(tmp_path, "objective.clip.scope=previous_step")
    assert row(replay_run(tmp_path, STEP, OWN), OWN)["gate_rate"] == 0
    engine.save(tmp_path / "checkpoints" / "step-000003")
    assert row(replay_run(tmp_path, STEP, OWN), OWN)["gate_rate"] > 0.01


def test_a_batch_that_waits_in_the_queue_is_that_of_training(run: Path, tmp_path: Path, replayed: Replay) -> None:
    make_run(tmp_path, trained=False)
    assert row(replay_run(tmp_path, STEP, "sat_grpo"), "sat_grpo") == row(replayed, "sat_grpo")


def test_turns_add_up_to_the_whole(run: Path, replayed: Replay) -> None:
    recorded = [facts.trajectory(r) for r in facts.read_part(run / "rollout_facts.parquet", STEP)][2:]
    turns = np.concatenate([t.turn_ids[t.loss_mask] for t in recorded])
    shares = np.bincount(turns) / len(turns)
    for figure in ("gate_rate", "clip_fraction"):
        by_turn = replayed.by_turn(figure)
        assert by_turn.columns == ["method", "all", "0", "1", "2", "3"]
        for _, overall, *rates in by_turn.iter_rows():
            assert float(shares @ rates) == NEAR(overall, abs=1e-6)
    assert row(replayed, "sat_grpo")["gate_rate"] == NEAR(0.1, abs=0.02)


def test_recorded_proximal_logprobs_let_every_method_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    table = tmp_path / "training_facts.parquet"
    rows = facts.read_part(table, STEP)
    rows = [r | {"proximal_logprobs": r["logprobs"]} for r in rows]
    facts.write_part(table, STEP, rows, facts.TRAINING_FACTS)
    found = replay_run(tmp_path, STEP, "grpo_tis,icepop")
    assert found.skipped == {}
    assert row(found, "grpo_tis")["clip_fraction"] == 0  # current is proximal, so the clipped ratio is 1
    assert row(found, "grpo_tis")["gradient_norm"] > 0
    facts.write_part(table, STEP, [rows[0] | {"proximal_logprobs": None}, *rows[1:]], facts.TRAINING_FACTS)
    assert set(replay_run(tmp_path, STEP, "grpo_tis,icepop").skipped) == {"grpo_tis", "icepop"}


def write_dump(path: Path, **changes: object) -> dict[str, list[object]]:
    """Two groups of two from two turns of three tokens, with a tool's tokens between; a column set to None is left
    out."""
    rng = np.random.default_rng(1)
    mask = [True] * 3 + [False] * 2 + [True] * 3
    current = [[float(x) for x in -rng.random(8 - i % 2) * 3 - 0.5] for i in range(4)]
    columns: dict[str, list[object]] = {
        "group_id": ["a", "a", "b", "b"],
        "reward": [0.0, 1.0, 1.0, 0.0],
        "logprobs": list(current),
        "behavior_logprobs": [[min(x + float(rng.normal(0, 0.4)), 0) for x in values] for values in current],
        "loss_mask": [mask[: len(values)] for values in current],
        "turn_ids": [[0, 0, 0, 0, 0, 1, 1, 1][: len(values)] for values in current],
    }
    columns = {name: value for name, value in (columns | changes).items() if value is not None}  # type: ignore[misc]
    pq.write_table(pa.table(columns), path)
    return columns


def padded(rows: list[list[float]]) -> np.ndarray:
    return np.array([[*values, *[0.0] * (8 - len(values))] for values in rows])


def test_a_dump_of_another_framework_has_the_figures_of_evaluate(tmp_path: Path) -> None:
    columns = write_dump(tmp_path / "dump.parquet")
    found = replay_file(tmp_path / "dump.parquet")
    assert found.gradient_of == "the log-probs"
    assert set(found.skipped) == PROXIMAL | R3
    assert found.skipped["gspo_r3"].endswith("has log-probs but no model to route")
    assert found.skipped["icepop"].startswith("needs proximal_logprobs, which ")
    arrays = {name: padded(value) for name, value in columns.items() if name not in ("group_id", "reward")}
    sign = np.sqrt(0.5) / (1 + np.sqrt(2) * 1e-6)  # +-0.5 over a std of sqrt(0.5)
    arrays["advantages"] = np.array([[-sign], [sign], [sign], [-sign]]) * np.ones((1, 8))
    direct = evaluate("gspo", **arrays)
    assert row(found, "gspo")["loss"] == NEAR(direct.loss, rel=1e-6)
    assert row(found, "gspo")["gradient_norm"] == NEAR(float(direct.grad_logprobs.norm()), rel=1e-6)
    assert row(found, "grpo")["cosine"] == NEAR(1, abs=1e-6)
    assert row(found, "dr_grpo")["loss"] == NEAR(
        evaluate("dr_grpo", **arrays | {"advantages": arrays["advantages"] * np.sqrt(0.5)}).loss, rel=1e-5
    )
    assert found.by_turn("clip_fraction").columns == ["method", "all", "0", "1"]


def test_advantages_and_proximal_logprobs_of_a_dump_are_read(tmp_path: Path) -> None:
    path = tmp_path / "dump.parquet"
    columns = write_dump(path)
    write_dump(path, advantages=[-2.0, 2.0, 2.0, -2.0], proximal_logprobs=columns["logprobs"])
    scalar = replay_file(path)
    assert set(scalar.skipped) == R3
    lengths = [len(values) for values in columns["logprobs"]]  # type: ignore[arg-type]
    listed = [[a] * n for a, n in zip([-2.0, 2.0, 2.0, -2.0], lengths, strict=True)]
    write_dump(path, advantages=listed, proximal_logprobs=columns["logprobs"])
    assert replay_file(path).table.equals(scalar.table, null_equal=True)
    write_dump(path)
    ratio = row(scalar, "grpo")["loss"] / row(replay_file(path, "grpo"), "grpo")["loss"]
    assert ratio == NEAR(2 * np.sqrt(2), rel=1e-5)


def test_nulls_where_nothing_was_sampled_are_not_read(tmp_path: Path) -> None:
    columns = write_dump(tmp_path / "dump.parquet")
    table = pl.DataFrame(columns).with_row_index()
    for name in ("logprobs", "behavior_logprobs", "turn_ids"):
        kept = table.explode("loss_mask", name).with_columns(pl.when(pl.col("loss_mask")).then(pl.col(name)))
        table = table.with_columns(kept.group_by("index", maintain_order=True).agg(name)[name])
    table.drop("index").write_parquet(tmp_path / "holes.parquet")
    whole, holed = (replay_file(tmp_path / f"{name}.parquet", "gspo").table for name in ("dump", "holes"))
    assert holed.equals(whole, null_equal=True)


@pytest.mark.parametrize("source", ["run", "dump"])
def test_sat_that_never_gates_is_grpo(run: Path, tmp_path: Path, source: str) -> None:
    write_dump(tmp_path / "dump.parquet")
    sat = method("sat_grpo")
    still: Methods = {"still": sat.model_copy(update={"clip": sat.clip.model_copy(update={"alpha": 1.0})})}
    found = replay_run(run, STEP, still) if source == "run" else replay_file(tmp_path / "dump.parquet", still)
    first, second = row(found, "grpo"), row(found, "still")
    assert {**first, "method": ""} == {**second, "method": ""}


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda path: write_dump(path, turn_ids=None, reward=None), "lacks the columns reward, turn_ids"),
        (lambda path: write_dump(path, turn_ids=[[0]] * 4), "row 0: turn_ids must be a list of 8 numbers"),
        (lambda path: write_dump(path, loss_mask=[True] * 4), "row 0: loss_mask must be a list of 8 numbers"),
        (lambda path: write_dump(path, logprobs=[-1.0] * 4), "row 0: logprobs must be a list of numbers"),
        (lambda path: write_dump(path, reward=[1.0, None, 0.0, 0.0]), "row 1: group_id and reward must be there"),
        (lambda path: write_dump(path, group_id=[0, 1, 1, 2]), "group 0 has one episode"),
        (lambda path: write_dump(path, loss_mask=[[False] * n for n in (8, 7, 8, 7)]), "no active token"),
        (lambda path: path.write_text("text"), "is not a Parquet file"),
        (lambda path: None, "no run and no Parquet file at"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path: Path, write: Callable[[Path], object], sentence: str) -> None:
    path = tmp_path / "dump.parquet"
    write(path)
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        replay_file(path, "grpo")
    assert "\n" not in str(caught.value)


def test_a_wrong_request_gets_one_sentence(run: Path, tmp_path: Path) -> None:
    cases: list[tuple[Path, int | None, str, str]] = [
        (run, 2, "all", "has no checkpoint of step 2; there are those of steps 3"),
        (run, None, "all", "say with --step which batch"),
        (run, STEP, "sat_grop", "unknown method 'sat_grop'; did you mean 'sat_grpo'?"),
        (run / "config.yaml", STEP, "all", "a file is one batch; leave out --step"),
        (tmp_path, STEP, "all", "no run at"),
    ]
    for target, step, methods, sentence in cases:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            replay_batch(target, step, methods)
    make_run(tmp_path, trained=False)
    RunState(step=STEP).save(tmp_path / "checkpoints" / "step-000003")
    with pytest.raises(ValueError, match="neither trained nor queued"):
        replay_run(tmp_path, STEP, "grpo")


def test_the_command_prints_and_writes_everything(run: Path, tmp_path: Path) -> None:
    csv, picture = tmp_path / "replay.csv", tmp_path / "replay.png"
    arguments = ["replay", str(run), "--step", "3", "--methods", "sat_grpo,kpop,sat_previous_step"]
    result = CliRunner().invoke(app, [*arguments, "--csv", str(csv), "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    assert "gradient with respect to the model's parameters" in result.output
    assert "skipped: kpop needs proximal_logprobs" in result.output
    assert "note: sat_previous_step learns from earlier steps" in result.output
    table = pl.read_csv(csv)
    assert table["method"].to_list() == ["grpo", "sat_grpo", "kpop", "sat_previous_step"]
    assert table["skipped"].is_null().to_list() == [True, True, False, True]
    assert picture.read_bytes().startswith(b"\x89PNG")
    wrong = CliRunner().invoke(app, ["replay", str(run), "--step", "9"])
    assert wrong.exit_code == 2
    assert "no checkpoint of step 9" in wrong.output
