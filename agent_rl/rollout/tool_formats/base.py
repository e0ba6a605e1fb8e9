"""How a model writes a tool call in its text."""

from typing import Protocol

from agent_rl.records import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolFormat(Protocol):
    """A part of kind `tool_format`, built as `cls(config)`: finds the calls in a turn's text."""

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in one assistant turn, in order; empty if it holds none.

        A call that cannot be read is returned with `error` set: it is shown to the model and costs a turn.
        """
        ...


def bodies(text: str) -> list[str | None]:
    """What stands between each pair of tool-call markers; None for one that is never closed."""
    found: list[str | None] = []
    for part in text.split(OPEN)[1:]:
        body, close, _ = part.partition(CLOSE)
        found.append(body if close else None)
    return found


NOT_CLOSED = "the tool call has no end marker"
