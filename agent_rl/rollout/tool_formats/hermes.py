"""Hermes format, as Qwen models write it: a JSON object with `name` and `arguments` between the markers."""

import json
from typing import Literal

from agent_rl.records import ToolCall
from agent_rl.registry import PartBase, PartConfig
from agent_rl.rollout.tool_formats.base import NOT_CLOSED, bodies


class HermesFormat(PartBase):
    """A call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; malformed JSON gives a call with `error`
    set."""

    class Config(PartConfig):
        """`tool_format: hermes` has no keys."""

        type: Literal["hermes"] = "hermes"

    def __init__(self, config: Config) -> None:
        self.config = config

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return tuple(_parse_body(body) for body in bodies(text))


def _parse_body(body: str | None) -> ToolCall:
    if body is None:
        return ToolCall("", {}, NOT_CLOSED)
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:  # also numbers too long for an int
        return ToolCall("", {}, f"the tool call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'the tool call needs a "name" and an "arguments" object')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, '"arguments" must be a JSON object')
    return ToolCall(call["name"], arguments)
