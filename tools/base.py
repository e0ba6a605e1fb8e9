"""The interface of tools. One file a tool; a tool lives as long as one episode, so it may keep state."""

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

from pydantic import BaseModel

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True)
class ToolResult:
    """What the model reads back. `ok` is False where the tool reports an error."""

    content: str
    ok: bool


class ToolError(Exception):
    """A tool that failed, as opposed to a call that went wrong: the episode is issued again."""


class Tool(ABC):
    """A tool of one episode. `call` takes the model's arguments; its signature and docstring are the schema.

    A call that goes wrong (an exception in the model's code, a timeout) is a `ToolResult` with ok False.
    A tool that itself fails (its server is gone) raises, whatever exception it is, and the episode is reissued.
    """

    Config: ClassVar[type[BaseModel]]
    name: ClassVar[str]

    @abstractmethod
    async def call(self, *_: Any, **arguments: Any) -> ToolResult: ...

    async def close(self) -> None:
        """Free what the tool holds; called once when the episode ends, also after a failure."""

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON schema of the tool as chat templates take it, read off the signature of `call`.

        Raises `ValueError` naming a parameter that has no annotation, or one that is no plain type.
        """
        parameters = inspect.signature(cls.call).parameters
        hints = get_type_hints(cls.call)
        own = [p for name, p in parameters.items() if name != "self"]
        for p in own:
            if hints.get(p.name) not in _JSON_TYPES:
                raise ValueError(
                    f"tool {cls.name}: annotate the parameter {p.name!r} of call as str, int, float or bool"
                )
        properties = {p.name: {"type": _JSON_TYPES[hints[p.name]]} for p in own}
        required = [p.name for p in own if p.default is inspect.Parameter.empty]
        return {
            "type": "function",
            "function": {
                "name": cls.name,
                "description": inspect.cleandoc(cls.call.__doc__ or ""),
                "parameters": {"type": "object", "properties": properties, "required": required},
            },
        }
