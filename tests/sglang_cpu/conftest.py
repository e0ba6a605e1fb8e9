"""One real server of a dense model and one of a mixture of experts, shared by all tests of this folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_rl.rollout.sglang.server import ServerProcess
from tests.sglang_cpu.servers import interpreter, launch, make_model, wait_until_healthy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder more time: a server may take minutes to start on a busy machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(1200))


@dataclass(frozen=True)
class Shared:
    """A running server and the model directory that it was launched with."""

    process: ServerProcess
    model: Path

    @property
    def url(self) -> str:
        return self.process.url


@pytest.fixture(scope="session")
def sglang_python() -> str:
    if not interpreter().is_file():
        pytest.skip("SGLang's own environment is missing: `make sglang-cpu` makes it")
    return str(interpreter())


@pytest.fixture(scope="session")
def servers(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Shared]]:
    """The two servers, started at the same time, since both mostly wait for imports."""
    root = tmp_path_factory.mktemp("sglang")
    shared = {}
    for kind in ("dense", "moe"):
        model = make_model(root / kind, kind)
        shared[kind] = Shared(launch(model, root / f"{kind}.log", report_routing=kind == "moe"), model)
    try:
        for server in shared.values():
            wait_until_healthy(server.process)
        yield shared
    finally:
        for server in shared.values():
            server.process.kill()


@pytest.fixture(scope="session")
def dense(servers: dict[str, Shared]) -> Shared:
    return servers["dense"]


@pytest.fixture(scope="session")
def moe(servers: dict[str, Shared]) -> Shared:
    return servers["moe"]
