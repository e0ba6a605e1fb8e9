"""Data flows one way through the folders; what needs Ray, the network or plots is where DESIGN puts it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "sandbox": {"agent_rl", "tools", "torch", "ray"},
    "tools": {"agent_rl", "torch", "ray", "transformers"},
    "agent_rl/objective": {"ray", "transformers", "httpx", "fastapi", "agent_rl.trainer", "agent_rl.rollout"},
    "agent_rl/records.py": {"ray", "transformers", "torch", "httpx", "fastapi"},
    "agent_rl/analysis": {"ray", "torch", "agent_rl.pipeline", "agent_rl.trainer", "agent_rl.rollout"},
    "agent_rl/data": {"ray", "torch", "agent_rl.rollout", "agent_rl.trainer", "agent_rl.pipeline"},
    "agent_rl/rewards": {"ray", "torch", "agent_rl.rollout", "agent_rl.trainer", "agent_rl.pipeline"},
    "agent_rl/rollout": {"agent_rl.trainer", "agent_rl.pipeline", "agent_rl.objective"},
    "agent_rl/trainer": {"agent_rl.rollout", "agent_rl.pipeline"},
}
RAY_MAY_BE_IMPORTED_BY = {
    "agent_rl/run.py",
    "agent_rl/pipeline/controller.py",
    "agent_rl/pipeline/workers.py",
    "agent_rl/pipeline/cluster.py",
    "agent_rl/trainer/group.py",
    "agent_rl/weights/distributed.py",
    "agent_rl/weights/transfer/handles.py",
    "agent_rl/weights/transfer/version_store.py",
    "agent_rl/weights/transfer/kept.py",
}
SOURCES = sorted(p for top in ("agent_rl", "sandbox", "tools") for p in (ROOT / top).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_flow(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    roots = {root for folder, banned in FORBIDDEN.items() if name.startswith(folder) for root in banned}
    wrong = {used for used in imports(path) for root in roots if used == root or used.startswith(root + ".")}
    assert not wrong
    uses_ray = any(used == "ray" or used.startswith("ray.") for used in imports(path))
    assert not uses_ray or name in RAY_MAY_BE_IMPORTED_BY


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or node.lineno) - node.lineno < 60, node.name
