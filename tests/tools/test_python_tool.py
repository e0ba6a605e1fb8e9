"""What the model reads back from its code."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from pydantic import ValidationError

from agent_rl import registry
from sandbox.base import SessionLost, Unavailable
from sandbox.client import SandboxClient
from tools.base import ToolResult
from tools.python import PythonTool


def with_tool(url: str, use: Callable[[PythonTool, SandboxClient], Awaitable[None]], **config: object) -> None:
    """Run `use` with a fresh tool, and close it."""

    async def run() -> None:
        client = SandboxClient(url)
        tool = PythonTool(PythonTool.Config(type="python", **config), client)
        await use(tool, client)
        await tool.close()
        await client.aclose()

    asyncio.run(run())


def calls(url: str, *codes: str, **config: object) -> list[ToolResult]:
    results: list[ToolResult] = []

    async def use(tool: PythonTool, _: SandboxClient) -> None:
        results.extend([await tool.call(code) for code in codes])

    with_tool(url, use, **config)
    return results


@pytest.mark.parametrize(
    ("code", "content", "ok"),
    [
        ("print(2 * 21)", "42", True),
        ("2 * 21", "42", True),
        ("print('a')\n'b'", "a\n'b'", True),
        ("x = 1", "(no output; use print)", True),
        ("print(x)", "NameError: name 'x' is not defined", False),
        ("print(1)\nprint(x)", "1\nNameError: name 'x' is not defined (line 2)", False),
        ("def f():\n  return 1 / 0\n\nf()", "ZeroDivisionError: division by zero (line 2)", False),
        ("print(1", "SyntaxError: '(' was never closed", False),
        ("raise SystemExit(2)", "SystemExit: 2", False),
        ("import os; os._exit(1)", "the session ended: its process ended\n(session ended; variables are lost)", False),
    ],
)
def test_content(server_url: str, code: str, content: str, ok: bool) -> None:
    (result,) = calls(server_url, code)
    assert (result.content, result.ok) == (content, ok)


def test_variables_last_for_the_episode_and_a_new_session_follows_a_dead_one(server_url: str) -> None:
    results = calls(server_url, "x = 20", "print(x + 1)", "import os; os._exit(0)", "print(x)", "print(5)")
    assert [result.ok for result in results] == [True, True, False, False, True]
    assert results[1].content == "21"
    assert results[3].content == "NameError: name 'x' is not defined"


def test_the_time_limit_is_the_configs(server_url: str) -> None:
    slow, after = calls(server_url, "y = 3\nwhile True: pass", "y", wall_s=0.3)
    assert (slow.content, slow.ok) == ("stopped after 0.3 s", False)
    assert after.content == "3"


def test_the_session_opens_with_the_first_call_and_closes_with_the_tool(server_url: str) -> None:
    counts: list[int] = []

    async def use(tool: PythonTool, client: SandboxClient) -> None:
        for step in (None, tool.call("1"), tool.call("2"), tool.close(), tool.close()):
            if step is not None:
                await step
            counts.append((await client.health())["open_sessions"])

    with_tool(server_url, use)
    assert counts == [0, 1, 1, 0, 0]


def test_a_lost_session_raises_in_a_call_and_not_in_close(server_url: str) -> None:
    async def use(tool: PythonTool, client: SandboxClient) -> None:
        await tool.call("1")
        assert tool._session_id is not None
        await client.close_session(tool._session_id)
        with pytest.raises(SessionLost):
            await tool.call("1")

    with_tool(server_url, use)


def test_no_server_raises_in_a_call_and_not_in_close() -> None:
    async def use(tool: PythonTool, _: SandboxClient) -> None:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await tool.call("1")

    with_tool("http://127.0.0.1:9", use)


def test_schema_and_registry() -> None:
    schema = PythonTool.schema()["function"]
    assert schema["name"] == "python"
    assert schema["description"].startswith("Run Python code")
    assert schema["parameters"] == {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
    }
    assert registry.find("tool", "python") is PythonTool
    with pytest.raises(ValidationError):
        PythonTool.Config.model_validate({"type": "python", "timeout": 3})
