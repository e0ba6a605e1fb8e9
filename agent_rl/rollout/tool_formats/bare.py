"""The bare format: the text between the markers is the one argument of the one tool; for small models."""

from typing import Any, Literal

from agent_rl import registry
from agent_rl.records import ToolCall
from agent_rl.registry import PartBase, PartConfig
from agent_rl.rollout.tool_formats.base import NOT_CLOSED, bodies


class BareFormat(PartBase):
    """A call is `<tool_call>ARGUMENT</tool_call>` without JSON; every call goes to the same tool."""

    class Config(PartConfig):
        """Keys of `tool_format: bare`."""

        type: Literal["bare"] = "bare"
        tool: str = "python"
        """The tool that every call goes to."""
        argument: str = "code"
        """The argument that the body is given as."""

        def check_run(self, run: Any) -> None:
            """The run has this one tool."""
            names = [registry.find("tool", tool.type).name for tool in run.rollout.tools]
            if names != [self.tool]:
                raise ValueError(
                    f"rollout.tool_format bare sends every call to the one tool {self.tool!r}, but rollout.tools has "
                    f"{', '.join(names)}; use tool_format hermes for several"
                )

    def __init__(self, config: Config) -> None:
        self.config = config

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return tuple(self._call(body) for body in bodies(text))

    def _call(self, body: str | None) -> ToolCall:
        if body is None:
            return ToolCall("", {}, NOT_CLOSED)
        return ToolCall(self.config.tool, {self.config.argument: body})
