"""The shipped model directory: loads offline, has its stated size, and spells a conversation as promised."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agent_rl
from agent_rl.warmstart.tokenizer import SPECIAL

MODEL = Path(agent_rl.__file__).parent / "assets" / "tiny-qwen3"
EPISODE = (
    "<|user|>s37 *4 +19 %50<|end|><|assistant|><tool_call>print(37*4)</tool_call><|end|>"
    "<|tool|>148<|end|><|assistant|><tool_call>print(148+19)</tool_call><|end|>"
    "<|tool|>167<|end|><|assistant|><tool_call>print(167%50)</tool_call><|end|>"
    "<|tool|>17<|end|><|assistant|>\\boxed{17}<|end|>"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL)


def call(code: str) -> dict[str, Any]:
    function = {"name": "python", "arguments": {"code": code}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def conversation() -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "s37 *4 +19 %50"}]
    for code, output in (("print(37*4)", "148"), ("print(148+19)", "167"), ("print(167%50)", "17")):
        messages += [call(code), {"role": "tool", "content": output}]
    return [*messages, {"role": "assistant", "content": r"\boxed{17}"}]


def test_size_and_architecture(model: Any) -> None:
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.num_parameters() == 305_856
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.eos_token_id == 6
    assert sum(f.stat().st_size for f in MODEL.iterdir()) < 1_400_000


def test_generation_config_changes_no_sampling_default(model: Any) -> None:
    defaults = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")
    assert all(getattr(model.generation_config, key) in (None, 1.0, False) for key in defaults)


def test_vocabulary(tokenizer: Any) -> None:
    assert len(tokenizer) == 105
    assert tokenizer.convert_ids_to_tokens(list(range(9))) == list(SPECIAL)
    assert (tokenizer.pad_token, tokenizer.unk_token, tokenizer.eos_token) == ("<|endoftext|>", "<|unk|>", "<|end|>")


def test_ascii_text_survives_a_round_trip(tokenizer: Any) -> None:
    text = "\n".join(["".join(map(chr, range(32, 127))), "  a , b . don't !", "", *SPECIAL, " x "])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a b\n")) == 4
    assert tokenizer.encode("é<tool_call>") == [1, 7]


def test_tool_calls_survive_where_special_tokens_are_skipped(tokenizer: Any) -> None:
    ids = tokenizer.encode("<tool_call>print(1)</tool_call><|end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>print(1)</tool_call>"


def test_template_spells_the_episode(tokenizer: Any) -> None:
    assert tokenizer.apply_chat_template(conversation(), tokenize=False) == EPISODE


def test_template_extras(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "1"}]
    render = tokenizer.apply_chat_template
    expected = "<|system|>Hi.<|end|><|user|>1<|end|><|assistant|>"
    assert render(messages, tokenize=False, add_generation_prompt=True) == expected
    tools = [{"type": "function", "function": {"name": "python", "parameters": {}}}]
    assert render(messages, tokenize=False, add_generation_prompt=True, tools=tools) == expected
    said = call("print(1)") | {"content": "So "}
    assert render([said], tokenize=False) == "<|assistant|>So <tool_call>print(1)</tool_call><|end|>"


def test_every_prefix_of_a_conversation_is_a_prefix_of_its_text(tokenizer: Any) -> None:
    messages = conversation()
    for n in range(1, len(messages)):
        start = tokenizer.apply_chat_template(messages[:n], tokenize=False)
        assert EPISODE.startswith(start)


def test_model_has_learnt_to_write_episodes(tokenizer: Any, model: Any) -> None:
    ids = torch.tensor([tokenizer.encode(EPISODE)])
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < 1.0 < math.log(105)


def test_the_mixture_has_the_same_tokenizer_and_stays_small() -> None:
    mixture = MODEL.parent / "tiny-qwen3-moe"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (mixture / name).read_bytes() == (MODEL / name).read_bytes()
    assert sum(f.stat().st_size for f in mixture.iterdir()) < 2_000_000
    model = AutoModelForCausalLM.from_pretrained(mixture)
    assert (type(model).__name__, model.num_parameters()) == ("Qwen3MoeForCausalLM", 417_600)
