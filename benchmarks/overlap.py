"""Wall time per step: generating ahead while training, against generating and then training, in one run.

The same actors run both schedules in turn: prefetch 0 (generate, then train) and prefetch 1 (overlapped).
Usage: python -m benchmarks.overlap [ROUNDS]
"""

import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from agent_rl.config import load
from agent_rl.pipeline.batches import BatchController
from agent_rl.pipeline.run_directory import RunDirectory
from agent_rl.pipeline.schedule import Schedule
from agent_rl.run import build_prompts, local_ray, serve_initial_weights, start_stages
from agent_rl.tool_server import ToolServer

STEPS = 6
CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


def run(schedule: Schedule, stages: Any, config: Any) -> list[dict[str, Any]]:
    """The steps of one schedule; the first, which warms up, and those at the ends, which cannot overlap, left out."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        serve_initial_weights(stages, None, 0, served=0)
        directory = RunDirectory(Path(folder), config)
        BatchController(config, schedule, stages, directory, rows.append).run()
        directory.close()
    return rows[1 : STEPS - 1]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    # A learning rate near 0: both schedules then see episodes of the same kind.
    overrides = [f"num_steps={STEPS}", "eval.every=0", "checkpoint.every=0", "trainer.learning_rate=1e-9"]
    config = load(CONFIG, overrides)
    arms = {"generate, then train": Schedule(0, 1), "overlapped (lag 1)": Schedule(1, 1)}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    with ToolServer(config.sandbox) as server, local_ray(2):
        stages = start_stages(config, build_prompts(config), server, waves=False)
        for _ in range(rounds):
            for name, schedule in arms.items():
                rows[name] += run(schedule, stages, config)
        stages.close()
    table = Table("schedule", "wall s a step", "generate s", "train s", "of the first")
    first = mean(row["wall_s"] for row in rows["generate, then train"])
    for name, found in rows.items():
        wall, generate, train = (mean(row[key] for row in found) for key in ("wall_s", "generate_s", "train_s"))
        table.add_row(name, f"{wall:.2f}", f"{generate:.2f}", f"{train:.2f}", f"{wall / first:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
