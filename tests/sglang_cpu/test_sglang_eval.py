"""`agent-rl eval` on a real running server: it is taken as it is, and scores as the same weights do elsewhere."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.ports import free_port
from agent_rl.rollout.sglang.served import check_same_model, served_model
from agent_rl.run import local_ray
from tests.configs import QUICKSTART
from tests.rollout.engine_conformance import SHORT
from tests.sglang_cpu.conftest import Shared
from tests.sglang_cpu.servers import ANSWER_S, TINY, engine_on

GREEDY = ("eval.num_prompts=24", "eval.sampling.temperature=0", "rollout.deadline_s=600")


def evaluate(target: str, output: Path) -> pl.DataFrame:
    found = CliRunner().invoke(app, ["eval", target, "--config", str(QUICKSTART), *GREEDY, "--output", str(output)])
    assert found.exit_code == 0, found.output
    return pl.read_parquet(output / "results.parquet")


def test_a_server_is_evaluated_as_it_is_and_scores_as_its_weights_do(dense: Shared, tmp_path: Path) -> None:
    stranger = {"model_path": str(TINY), "weight_version": "theirs, 7"}
    httpx.post(f"{dense.url}/update_weights_from_disk", json=stranger, timeout=ANSWER_S).raise_for_status()
    with local_ray(1):
        served = evaluate(dense.url, tmp_path / "served")
        embedded = evaluate(str(TINY), tmp_path / "embedded")
    same = ["problem", "final_text", "outcome", "stop_reason", "num_turns", "num_tokens", "num_sampled"]
    assert served.select(same).equals(embedded.select(same)), "greedy: the same tokens from both engines"
    assert httpx.get(f"{dense.url}/model_info", timeout=ANSWER_S).json()["weight_version"] == "theirs, 7"
    record = json.loads((tmp_path / "served" / "evaluation.json").read_text())
    assert record["model"] == str(TINY)
    assert record["server"] == {"url": dense.url, "weight_version": "theirs, 7"}
    command = ["compare", str(tmp_path / "embedded"), str(tmp_path / "served")]
    assert CliRunner().invoke(app, command).exit_code == 2, "another engine is another setting"
    forced = CliRunner().invoke(app, [*command, "--force"])
    assert "as weight version 'theirs, 7'" in forced.output
    assert forced.exit_code == 0


def test_what_cannot_be_evaluated_is_one_sentence(dense: Shared, tool_server: str) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    for url, message in ((dead, "no SGLang server can be evaluated there"), (tool_server, "is no SGLang server")):
        with pytest.raises(ValueError, match=message):
            asyncio.run(served_model(url))
    refused = CliRunner().invoke(app, ["eval", dense.url])
    assert refused.exit_code == 2
    short = ["eval", dense.url, "--config", str(QUICKSTART), "rollout.max_episode_tokens=300"]
    short += ["rollout.engine.max_sequence_tokens=300"]
    refused = CliRunner().invoke(app, short)
    assert refused.exit_code == 2
    assert "takes sequences of" in refused.output


def test_another_model_is_refused_where_its_files_are_elsewhere(dense: Shared, moe: Shared, tmp_path: Path) -> None:
    served = asyncio.run(served_model(dense.url))
    assert served.directory() is not None
    assert replace(served, model="/elsewhere", tokenizer="/elsewhere").directory() is None
    asyncio.run(check_same_model(served, dense.model))
    with pytest.raises(ValueError, match="has a qwen3 model"):
        asyncio.run(check_same_model(served, moe.model))
    config = json.loads((dense.model / "config.json").read_text())
    for size in (config["vocab_size"] - 1, config["vocab_size"] + 1):
        (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
        with pytest.raises(ValueError, match="another vocabulary"):
            asyncio.run(check_same_model(served, tmp_path))


def test_weights_that_change_under_an_evaluation_stop_it_and_none_are_loaded(dense: Shared) -> None:
    prompt = np.arange(1, 9, dtype=np.int32)

    async def body() -> None:
        version = (await served_model(dense.url)).weight_version
        engine, late = (engine_on(dense.url, dense.model, as_served=label) for label in (version, "before"))
        completion = await engine.generate(0, prompt, SHORT)
        assert set(completion.policy_versions.tolist()) == {0}
        with pytest.raises(ValueError, match="nothing is loaded"):
            await engine.update_weights(str(dense.model / "model.safetensors"), 1)
        with pytest.raises(ValueError, match=f"changed from version 'before' to '{version}'"):
            await late.generate(0, prompt, SHORT)
        await engine.close()
        await late.close()

    asyncio.run(body())
