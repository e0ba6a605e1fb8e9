"""What the SGLang engine sends and reads, without a server: command lines, bodies, versions, weights, configs."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from agent_rl.config import RunConfig, model_directory
from agent_rl.records import FinishReason, SamplingParams
from agent_rl.registry import find
from agent_rl.rollout.engines.base import EngineError, joined
from agent_rl.rollout.engines.sglang import SGLangEngine
from agent_rl.rollout.sglang.config import SGLangConfig
from agent_rl.rollout.sglang.messages import ModelShape, VersionLabels, read_part, request_body
from agent_rl.rollout.sglang.server import launch_command, launch_environment
from agent_rl.rollout.sglang.weights import as_directory, check_shapes
from agent_rl.settings import check
from agent_rl.weights.base import WeightFile

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = model_directory("builtin:tiny-qwen3")
SHAPE = ModelShape(vocab_size=9, max_positions=64, routed_layers=(True, False), experts_per_token=2)
LABELS = VersionLabels("ab12")
PROMPT = np.array([4, 5, 6], np.int32)


def answer(ids: list[int], finish: str = "length", **meta: Any) -> dict[str, Any]:
    given = {"finish_reason": {"type": finish}, "weight_version": "ab12-3"}
    return {"output_ids": ids, "meta_info": given | meta}


def test_the_whole_support_is_read_from_the_plain_log_probs() -> None:
    body = request_body(PROMPT, SamplingParams(0.7, seed=5, stop_token_ids=(2,)), 8, -1, None)
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 8,
        "stop_token_ids": [2],
        "sampling_seed": 5,
    }
    assert "return_sampling_mask" not in body
    part = read_part(
        answer([7, 2], "stop", output_token_logprobs=[[-0.5, 7, None], [-1.5, 2, None]]), body, LABELS, SHAPE
    )
    assert part.behavior_logprobs.tolist() == [-0.5, -1.5]
    assert part.sampling_mask.sizes.tolist() == [0, 0]
    assert part.policy_versions.tolist() == [3, 3]


def test_a_cut_support_is_read_from_the_kept_sets_and_never_from_the_plain_log_probs() -> None:
    body = request_body(PROMPT, SamplingParams(top_p=0.9), 8, 9, None)
    assert body["return_sampling_mask"] is True
    plain = [[-9.0, 7, None], [-9.0, 2, None]]
    kept = {"output_token_sampling_mask": [[8, 7], [2]], "output_token_sampling_logprobs": [-0.25, 0.0]}
    part = read_part(answer([7, 2], output_token_logprobs=plain, **kept), body, LABELS, SHAPE)
    assert part.behavior_logprobs.tolist() == [-0.25, 0.0]
    assert part.sampling_mask.token_ids.tolist() == [7, 8, 2]
    assert part.sampling_mask.sizes.tolist() == [2, 1]
    with pytest.raises(EngineError, match="2 sampled tokens came with 0 log-probs"):
        read_part(answer([7, 2], output_token_logprobs=plain), body, LABELS, SHAPE)


def test_greedy_is_certain_of_its_token() -> None:
    body = request_body(PROMPT, SamplingParams(temperature=0.0), 8, -1, None)
    part = read_part(answer([7, 2]), body, LABELS, SHAPE)
    assert part.behavior_logprobs.tolist() == [0.0, 0.0]
    assert part.sampling_mask.token_ids.tolist() == [7, 2]


def test_routing_is_read_for_the_inputs_asked_for_and_left_out_on_dense_layers() -> None:
    body = request_body(PROMPT, SamplingParams(), 8, -1, routed_from=1)
    assert body["routed_experts_start_len"] == 1
    rows = np.arange(3 * 2 * 2, dtype=np.int32)
    encoded = base64.b64encode(rows.tobytes()).decode()
    logprobs = {"output_token_logprobs": [[-1.0, 7, None], [-1.0, 2, None]]}
    part = read_part(answer([7, 2], routed_experts=encoded, **logprobs), body, LABELS, SHAPE)
    assert part.routed_experts is not None
    assert part.routed_experts.tolist() == [[[0, 1], [-1, -1]], [[4, 5], [-1, -1]], [[8, 9], [-1, -1]]]
    with pytest.raises(EngineError, match="routing of 3 inputs was reported instead of 4"):
        read_part(
            answer([7, 2, 1], routed_experts=encoded, output_token_logprobs=[[-1.0, 7, None]] * 3), body, LABELS, SHAPE
        )


def test_a_request_aborted_while_it_waited_has_routing_of_no_inputs_yet() -> None:
    body = request_body(PROMPT, SamplingParams(), 8, -1, routed_from=1)
    waited = read_part(answer([], "abort", output_token_logprobs=[]), body, LABELS, SHAPE)
    assert waited.routed_experts is not None
    assert waited.routed_experts.shape == (0, 2, 2)
    rows = base64.b64encode(np.arange(2 * 2 * 2, dtype=np.int32).tobytes()).decode()
    rest = answer([2], "stop", output_token_logprobs=[[-1.0, 2, None]], routed_experts=rows)
    whole = joined([waited, read_part(rest, body, LABELS, SHAPE)]).routed_experts
    assert whole is not None
    assert whole.shape == (2, 2, 2)
    for ids, finish in (([], "stop"), ([2], "abort")):
        logprobs = [[-1.0, token, None] for token in ids]
        with pytest.raises(EngineError, match="routing of 0 inputs"):
            read_part(answer(ids, finish, output_token_logprobs=logprobs), body, LABELS, SHAPE)


def test_parts_of_an_aborted_request_join_to_one_completion() -> None:
    body = request_body(PROMPT, SamplingParams(), 8, -1, None)
    first = read_part(answer([7], "abort", output_token_logprobs=[[-1.0, 7, None]]), body, LABELS, SHAPE)
    nothing = read_part(answer([], "abort", output_token_logprobs=[]), body, LABELS, SHAPE)
    last = read_part(
        answer([2], "stop", output_token_logprobs=[[-2.0, 2, None]], weight_version="ab12-4"), body, LABELS, SHAPE
    )
    assert first.finish_reason is nothing.finish_reason is FinishReason.ABORT
    whole = joined([first, nothing, last])
    assert (whole.token_ids.tolist(), whole.behavior_logprobs.tolist()) == ([7, 2], [-1.0, -2.0])
    assert (whole.policy_versions.tolist(), whole.finish_reason.value) == ([3, 4], "stop")


@pytest.mark.parametrize(
    ("ids", "ended"), [([7, 2], FinishReason.STOP), ([7, 1], FinishReason.LENGTH), ([7], FinishReason.ABORT)]
)
def test_an_abort_after_the_last_token_is_the_end_of_the_turn(ids: list[int], ended: FinishReason) -> None:
    """SGLang takes one more step before it aborts, and then says ABORT whatever that step sampled."""
    body = request_body(PROMPT, SamplingParams(stop_token_ids=(2,)), 2, -1, None)
    logprobs = [[-1.0, token, None] for token in ids]
    assert read_part(answer(ids, "abort", output_token_logprobs=logprobs), body, LABELS, SHAPE).finish_reason is ended


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=6))
def test_spans_become_a_version_a_token(spans: list[tuple[int, int]]) -> None:
    ends = np.cumsum([length for _, length in spans]).tolist()
    meta = {
        "weight_version": "ab12-99",
        "weight_versions": [
            {"version": LABELS.of(version), "start": end - length, "end": end}
            for (version, length), end in zip(spans, ends, strict=True)
        ],
    }
    expected = [version for version, length in spans for _ in range(length)]
    assert LABELS.per_token(meta, ends[-1]).tolist() == expected


@pytest.mark.parametrize("label", ["default", "3", "ab12-", "ffff-3", "ab12-x"])
def test_a_version_of_someone_else_is_an_error(label: str) -> None:
    with pytest.raises(EngineError, match="did not load"):
        LABELS.per_token({"weight_version": label}, 2)
    with pytest.raises(EngineError, match="without a weight version"):
        LABELS.per_token({"weight_versions": [{"version": "ab12-1", "start": 0, "end": 1}], "weight_version": ""}, 2)


def test_the_launch_command_and_environment() -> None:
    config = SGLangConfig(python="py", tp_size=2, dp_size=2, first_gpu=1, max_sequence_tokens=100, deterministic=True,
                          launch_args=["--dtype", "bfloat16"], environment={"A": "1", "B": "2"})  # fmt: skip
    assert " ".join(launch_command(config, "/m", 30000, "ab12-0", report_routing=True)) == (
        "py -m sglang.launch_server --model-path /m --skip-tokenizer-init --host 127.0.0.1 --port 30000 "
        "--weight-version ab12-0 --context-length 108 --sampling-mask-max-tokens 4096 --tp-size 2 --dp-size 2 "
        "--enable-return-routed-experts --enable-deterministic-inference --dtype bfloat16"
    )
    inherited = {"PATH": "/bin", "PYTHONPATH": "/ours", "CUDA_VISIBLE_DEVICES": "", "B": "0"}
    environment = launch_environment(config, 1, inherited)
    assert environment == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "5,6,7,8",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "A": "1",
        "B": "2",
    }


def test_weights_that_are_not_all_of_the_models_are_refused(tmp_path: Path) -> None:
    model = {"a": (2, 3), "b": (4,), "lm_head.weight": (5, 2)}
    check_shapes({"a": (2, 3), "b": (4,)}, model, tmp_path)
    for wrong, message in (
        ({"a": (2, 3)}, "b is missing"),
        ({"a": (1, 3), "b": (4,)}, r"a is \(1, 3\), not \(2, 3\)"),
        ({"a": (2, 3), "b": (4,), "c": (1,)}, "c is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            check_shapes(wrong, model, tmp_path)
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(4, np.float32)}, tmp_path / "two.safetensors")
    assert WeightFile(tmp_path).shapes() == {"a": (2, 3), "b": (4,)}


def test_a_file_of_weights_is_read_as_a_model_directory(tmp_path: Path) -> None:
    weights = tmp_path / "5.safetensors"
    save_file({"b": np.zeros(4, np.float32)}, weights)
    (tmp_path / "views").mkdir()
    with as_directory(weights, TINY, tmp_path / "views") as directory:
        assert WeightFile(directory).shapes() == {"b": (4,)}
        assert (directory / "config.json").read_text() == (TINY / "config.json").read_text()
    assert list((tmp_path / "views").iterdir()) == []
    assert WeightFile(weights).shapes() == {"b": (4,)}


def test_the_registry_finds_it_and_bad_settings_are_refused() -> None:
    assert find("engine", "sglang") is SGLangEngine
    with pytest.raises(ValueError, match="one address for each"):
        SGLangEngine(SGLangConfig(urls=["http://127.0.0.1:1"], max_sequence_tokens=64), str(TINY), worker_index=1)
    with pytest.raises(ValueError, match="positions; lower it"):
        SGLangEngine(SGLangConfig(max_sequence_tokens=1 << 20), str(TINY))


QWEN3 = {"hidden_size": 2048, "head_dim": 128, "vocab_size": 151936}
GPU_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_1.7b_8gpu.yaml": QWEN3
    | {"model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
       "intermediate_size": 6144, "max_position_embeddings": 40960},
    "qwen3_30b_a3b_r3.yaml": QWEN3
    | {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
       "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
       "mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True, "max_position_embeddings": 32768},
}  # fmt: skip
"""The shapes of their models, which are not here."""


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_a_gpu_config_fits_its_model_and_launches_what_it_says(name: str, tmp_path: Path) -> None:
    for file in TINY.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(GPU_CONFIGS[name]))
    mapping = yaml.safe_load((CONFIGS / name).read_text())
    model = mapping["model"]["path"]
    mapping |= {
        "model": {"path": str(tmp_path)},
        "prompts": {"type": "chains"},
        "eval": {"prompts": {"type": "chains"}},
    }
    config = check(RunConfig, mapping, name)
    engine = config.rollout.engine
    assert engine.max_sequence_tokens >= config.rollout.max_episode_tokens
    command = " ".join(launch_command(engine, model, 30000, "ab12-0", report_routing=config.routing_replay))
    assert f"--model-path {model} " in command
    assert f"--tp-size {engine.tp_size}" in command
    assert ("--enable-return-routed-experts" in command) == ("a3b" in name)
    assert config.ray.trainer_gpus == config.num_trainer_ranks
    assert config.ray.worker_gpus == engine.tp_size * engine.dp_size
    visible = {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert launch_environment(engine, 1, visible)["CUDA_VISIBLE_DEVICES"] == "6,7", "those that Ray gave"
