"""Trained tokens per second with slow tools: fully asynchronous rollouts against generating, then training, in one run.

    python -m benchmarks.async_overlap [--latency-ms 50] [--steps 8] [--rounds 2] [--concurrent 128]

Every tool call takes so many milliseconds more, as on a busy or distant tool server. The arms take turns, each a run
of its own with the shipped model at a learning rate near 0, so that all sample episodes of the same kind. The first two
steps of a run, which warm up and fill the queue, are left out. The second table says where the seconds went.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from agent_rl.analysis.seconds import seconds_table
from agent_rl.config import load
from agent_rl.pipeline.cluster import local_ray
from agent_rl.run import train
from tools.base import ToolResult
from tools.python import PythonConfig, PythonTool

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
SLOW = "benchmarks.async_overlap.SlowPython"
ARMS = {
    "sync": ("pipeline={type: sync}",),
    "batch_async, lag 1": ("pipeline={type: batch_async, exact_lag: 1}",),
    "fully_async, lag <= 2": ("pipeline={type: fully_async, max_lag: 2}",),
}
SKIPPED = 2


class SlowConfig(PythonConfig):
    type: Literal["benchmarks.async_overlap.SlowPython"] = "benchmarks.async_overlap.SlowPython"  # type: ignore[assignment]
    latency_s: float = 0.05


class SlowPython(PythonTool):
    """The Python tool behind a slow line."""

    Config = SlowConfig

    def __init__(self, config: SlowConfig, sandbox: Any) -> None:
        super().__init__(config, sandbox)
        self._latency_s = config.latency_s

    async def call(self, code: str) -> ToolResult:
        """Run Python code and return what it prints, or the value of its last line. Variables are kept."""
        await asyncio.sleep(self._latency_s)
        return await super().call(code)


def run(arm: tuple[str, ...], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one run's steps after the first ones."""
    tool = f"rollout.tools=[{{type: {SLOW}, latency_s: {arguments.latency_ms / 1000}}}]"
    size = (f"num_steps={arguments.steps}", f"rollout.max_concurrent_episodes={arguments.concurrent}")
    quiet = ("eval.every=0", "checkpoint.every=0", "trainer.learning_rate=1e-9")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        train(load(CONFIG, [*size, *quiet, *arm, tool]), Path(folder), False, rows.append)
    return [row for row in rows if row["step"] >= SKIPPED and row["wall_s"] is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrent", type=int, default=128, help="episodes at once")
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    ratios: dict[str, list[float]] = {name: [] for name in ARMS}
    with local_ray(8):
        for _ in range(arguments.rounds):
            speeds = {}
            for name, arm in ARMS.items():
                found = run(arm, arguments)
                rows[name] += found
                speeds[name] = sum(r["trained_tokens"] for r in found) / sum(r["wall_s"] for r in found)
            for name, speed in speeds.items():
                ratios[name].append(speed / speeds["sync"])
    _print(rows, ratios)


def _print(rows: dict[str, list[dict[str, Any]]], ratios: dict[str, list[float]]) -> None:
    table = Table("regime", "tokens/s", "of sync, a round each", "median", "mean lag", "max lag")
    for name, found in rows.items():
        speed = sum(row["trained_tokens"] for row in found) / sum(row["wall_s"] for row in found)
        lag, most = statistics.mean(row["lag_mean"] for row in found), max(row["lag_max"] for row in found)
        each = " ".join(f"{ratio:.2f}" for ratio in ratios[name])
        table.add_row(name, f"{speed:.0f}", each, f"{statistics.median(ratios[name]):.2f}", f"{lag:.2f}", f"{most}")
    Console(width=120).print(table)
    states = ("generate", "tool", "score", "train", "push", "queue", "idle", "step")
    spent = Table("regime", "who", *states)
    for name, found in rows.items():
        for line in seconds_table(found).iter_rows(named=True):
            spent.add_row(name, line["who"], *(f"{line[s]:.2f}" if line.get(s) is not None else "" for s in states))
    Console(width=120).print(spent)


if __name__ == "__main__":
    main()
