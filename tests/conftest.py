"""Fixtures of several tests: one real tool server for the whole session."""

import os
from collections.abc import Iterator

import pytest

from agent_rl.config import SandboxConfig
from agent_rl.tool_server import ToolServer

# Ray's workers have niceness 15 otherwise, and get next to nothing of a processor that others are busy on.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")

WHOLE_RUNS = ("test_run.py", "test_lag_zero.py", "test_replay.py", "test_layouts.py")
"""Files with the longest tests; they run first, so that parallel workers end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in WHOLE_RUNS)


@pytest.fixture(scope="session")
def tool_server() -> Iterator[str]:
    """The address of a running tool server. Fails, with the server's own reason, where isolation cannot be had."""
    with ToolServer(SandboxConfig()) as server:
        yield server.url
