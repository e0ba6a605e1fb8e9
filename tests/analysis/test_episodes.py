"""The sample of episodes: what it picks, what it says of each token, and that its clip states are the run's own."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from agent_rl.analysis import clip_states, episodes
from agent_rl.analysis.recorded import RecordedRun
from agent_rl.analysis.token_text import TokenTexts
from agent_rl.config import model_directory
from agent_rl.rollout.renderer import Renderer


def facts(run: Path, table: str) -> pl.DataFrame:
    return pl.read_parquet(run / f"{table}.parquet" / "*.parquet")


def test_the_sample_is_bounded_and_spans_the_training(recorded: Path) -> None:
    run = RecordedRun(recorded)
    sample = episodes.sample(run, most=12)
    assert len(sample.episodes) == 12
    assert sample.num_recorded == 64
    assert {e["step"] for e in sample.episodes} == {0, 1, 2, 3}
    assert [(e["step"], e["id"]) for e in sample.episodes] == sorted((e["step"], e["id"]) for e in sample.episodes)
    assert {e["stop"] for e in sample.episodes} == set(run.rollouts()["stop_reason"])
    assert episodes.sample(RecordedRun(recorded), most=12) == sample
    few = episodes.sample(run, most=12, most_tokens=200)
    assert 0 < sum(len(s["tok"]) for e in few.episodes for s in e["segments"]) <= 200


def test_the_worst_token_is_in_the_sample(recorded: Path) -> None:
    worst = max(
        (abs(lp - mu), row["episode_id"])
        for row in facts(recorded, "training_facts").join(facts(recorded, "rollout_facts"), on="episode_id").to_dicts()
        for lp, mu, active in zip(row["logprobs"], row["behavior_logprobs"], row["loss_mask"], strict=True)
        if active
    )
    sample = episodes.sample(RecordedRun(recorded), most=8)
    shown = {e["id"]: e["max_abs_d"] for e in sample.episodes}
    assert shown[worst[1]] == pytest.approx(worst[0], rel=1e-3)


def test_an_episode_says_what_was_recorded(recorded: Path) -> None:
    run = RecordedRun(recorded)
    sample = episodes.sample(run, most=8)
    texts = np.array([token for token, _ in sample.texts])
    rollouts = {row["episode_id"]: row for row in facts(recorded, "rollout_facts").to_dicts()}
    trained = {row["episode_id"]: row for row in facts(recorded, "training_facts").to_dicts()}
    renderer = Renderer(model_directory("builtin:tiny-qwen3"))
    for episode in sample.episodes:
        row = rollouts[episode["id"]]
        indices = [index for segment in episode["segments"] for index in segment["tok"]]
        assert texts[indices].tolist() == row["token_ids"]
        text = "".join(sample.texts[index][1] for index in indices)
        assert text == renderer.tokenizer.decode(row["token_ids"])
        sampled = [segment for segment in episode["segments"] if segment["sampled"]]
        assert [segment["turn"] for segment in sampled] == list(range(row["num_turns"]))
        active = np.array(row["loss_mask"])
        for name, column in (("lp", trained[episode["id"]]["logprobs"]), ("mu", row["behavior_logprobs"])):
            shown = [value for segment in sampled for value in segment[name]]
            assert shown == pytest.approx(np.array(column)[active].tolist(), rel=1e-3)
        assert [v for segment in sampled for v in segment["kept"]] == np.diff(row["kept_offsets"]).tolist()
        assert [v for segment in sampled for v in segment["ver"]] == np.array(row["policy_versions"])[active].tolist()
        assert episode["advantage"] == pytest.approx(trained[episode["id"]]["advantage"], rel=1e-3)
        assert [turn["results"] for turn in episode["turns"]] == [turn["tool_results"] for turn in row["turns"]]


def test_clip_states_gate_and_clip_as_many_tokens_as_the_run_did(recorded: Path) -> None:
    run = RecordedRun(recorded)
    index = episodes._Index(run)
    for step in range(4):
        rows = index.read(step)
        states = np.concatenate([row["states"][row["loss_mask"]] for row in rows])
        metrics = run.metrics()[step]
        clipped = np.isin(states, [clip_states.CLIPPED, clip_states.NEWLY_CLIPPED])
        assert clipped.mean() == pytest.approx(metrics["clip_fraction"], abs=1e-9)
        newly = states == clip_states.NEWLY_CLIPPED
        assert newly.mean() == pytest.approx(metrics["newly_clipped_fraction"], abs=1e-9)
        assert (states == clip_states.DROPPED).sum() == 0
    assert clipped.any()


def test_clip_states_that_the_run_did_not_have_are_not_shown(run: Path) -> None:
    """Another objective in the config than the one that was trained with stands for a clip with a memory."""
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("eps_low: 0.2", "eps_low: 0.0001"))
    sample = episodes.sample(RecordedRun(run), most=4)
    assert any("depend on earlier ones" in note for note in sample.notes)
    changed = [e for e in sample.episodes if e["step"] == 3]
    assert all("state" not in segment for e in changed for segment in e["segments"])


def test_episodes_that_were_trained_at_another_step_are_found(run: Path) -> None:
    """In regimes that are not in lock-step a batch's number is not the step's."""
    folder = run / "rollout_facts.parquet"
    (folder / "part-000003.parquet").rename(folder / "part-000017.parquet")
    assert len(episodes._Index(RecordedRun(run)).read(3)) == 16


def test_without_a_tokenizer_ids_are_shown(run: Path) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("builtin:tiny-qwen3", "models/gone"))
    sample = episodes.sample(RecordedRun(run), most=2)
    assert any("by id" in note for note in sample.notes)
    assert all(text == f"⟨{token}⟩" for token, text in sample.texts)


def test_a_character_spread_over_tokens_is_the_text_of_the_last(tmp_path: Path) -> None:
    class Bytes:
        """A tokenizer of single bytes."""

        def decode(self, ids: list[int], **options: bool) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    texts = TokenTexts({})
    texts._tokenizer = Bytes()
    shown = [texts.table[index][1] for index in texts.indices([*"aé€".encode(), 0xFF, 0x61, 0x62, 0x63])]
    assert shown[:6] == ["a", "", "é", "", "", "€"]
    assert len(shown) == 10  # bytes that are no character end after four tokens


def test_groups_with_mixed_rewards_are_preferred() -> None:
    rows = [
        {
            "step": 0,
            "episode_id": i,
            "group_id": i // 3,
            "reward": r,
            "num_turns": i,
            "stop_reason": "answer",
            "worst": 0,
        }
        for i, r in enumerate([1.0, 1.0, 1.0, 0.0, 1.0, 0.5, 0.0, 0.0, 0.0])
    ]
    picked = episodes._of_one_step(rows)
    assert [row["episode_id"] for row in picked] == [4, 3, 5]  # best, worst, most turns


def test_json_has_no_nan(recorded: Path) -> None:
    text = json.dumps(episodes.sample(RecordedRun(recorded), most=4).as_json(), allow_nan=False)
    assert len(json.loads(text)["episodes"]) == 4
