"""What several tests share: one real tool server a session."""

from collections.abc import Iterator

import pytest

from agent_rl.config import SandboxConfig
from agent_rl.tool_server import ToolServer


@pytest.fixture(scope="session")
def tool_server() -> Iterator[str]:
    """The address of a running tool server. Fails, with the server's own reason, where isolation cannot be had."""
    with ToolServer(SandboxConfig()) as server:
        yield server.url
