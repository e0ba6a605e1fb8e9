"""A training step of this package against one of TRL's GRPOTrainer, in CPU-seconds, in one run.

The same model, prompts, group size, token budget and tool server; the learning rate is near 0, so that every
step sees episodes of the same kind. The tool server's CPU is counted apart: it is the same work. `lag 1` stands
beside for its wall time, which is what generating while training saves.

TRL needs an environment of its own:
    python -m venv .trl && .trl/bin/pip install torch==2.13.0 trl==1.16.0 jmespath httpx pydantic
Usage: python -m benchmarks.vs_trl [--trl .trl/bin/python] [--steps 8] [--rounds 2]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from agent_rl.config import SandboxConfig, load
from agent_rl.tool_server import ToolServer
from benchmarks.process_tree import cpu_seconds

HERE = Path(__file__).parent
WARM_UP = 2
PROMPTS, GROUP, BUDGET, TURNS = 16, 8, 192, 6
REGIMES = {"sync": ["pipeline.type=sync"], "lag 1": ["pipeline={type: batch_async, exact_lag: 1}"]}


def own_arm(name: str, url: str, steps: int) -> None:
    """Train in this process and print a mark after every step."""
    from agent_rl.run import train

    sizes = [f"num_steps={steps}", f"batch.num_prompts={PROMPTS}", f"batch.group_size={GROUP}"]
    lengths = [f"rollout.max_turn_tokens={BUDGET}", "rollout.max_episode_tokens=256", f"rollout.max_tool_turn={TURNS}"]
    quiet = ["eval.every=0", "checkpoint.every=0", "trainer.learning_rate=1e-9", f"sandbox.url={url}"]
    config = load(
        HERE.parent / "configs" / "quickstart.yaml", [*sizes, *lengths, *quiet, *REGIMES[name]], method="grpo"
    )
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run", False, lambda row: mark())


def mark() -> None:
    print(json.dumps({"cpu_s": cpu_seconds(), "wall": time.monotonic()}), flush=True)


def measure(command: list[str], server: ToolServer) -> list[dict[str, float]]:
    """Run an arm; what each step but the first and the last ones took: cpu_s, wall_s, tool_cpu_s and execs."""
    environment = os.environ | {
        "PYTHONPATH": str(HERE.parent),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    marks: list[dict[str, float]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=HERE.parent) as process:
        assert process.stdout is not None
        assert server.process is not None
        for line in process.stdout:
            if line.startswith('{"cpu_s"'):
                execs = httpx.get(f"{server.url}/health").json()["execs"]
                marks.append(json.loads(line) | {"tool_cpu_s": cpu_seconds(server.process.pid), "execs": execs})
    if process.returncode:
        raise SystemExit(f"this arm ended with exit code {process.returncode}: {' '.join(command)}")
    marks = marks[WARM_UP - 1 : -1]  # the last step of the asynchronous arm generates nothing
    steps = pairwise(marks)
    return [{key: after[key] - before[key] for key in after} for before, after in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default=".trl/bin/python", help="the interpreter that has TRL")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        own_arm(given.arm, given.url, given.steps)
        return
    if not Path(given.trl).is_file():
        raise SystemExit(f"no interpreter at {given.trl}; make TRL's environment as the first lines of this file say")
    with ToolServer(SandboxConfig()) as server:
        found = compare(server, given)
    table = Table(
        "arm", "CPU s a step", "of TRL's", "wall s a step", "of TRL's", "tool CPU s a step", "tool calls a step"
    )
    trl = found["TRL 1.16 GRPOTrainer"]
    for name, steps in found.items():
        cpu, wall = (median(step[key] for step in steps) for key in ("cpu_s", "wall"))
        shares = [value / median(step[key] for step in trl) for key, value in (("cpu_s", cpu), ("wall", wall))]
        rest = [mean(step[key] for step in steps) for key in ("tool_cpu_s", "execs")]
        table.add_row(
            name, f"{cpu:.2f}", f"{shares[0]:.2f}", f"{wall:.2f}", f"{shares[1]:.2f}", *(f"{r:.1f}" for r in rest)
        )
    Console().print(table)


def compare(server: ToolServer, given: Any) -> dict[str, list[dict[str, float]]]:
    """The steps of every arm, the arms taking turns."""
    sizes = {"steps": given.steps, "prompts": PROMPTS, "group": GROUP, "budget": BUDGET, "turns": TURNS}
    trl = [given.trl, "-m", "benchmarks.trl_arm", "--url", server.url]
    trl += [text for key, value in sizes.items() for text in (f"--{key}", str(value))]
    own = [sys.executable, "-m", "benchmarks.vs_trl", "--url", server.url, "--steps", str(given.steps)]
    commands = {"TRL 1.16 GRPOTrainer": trl, **{name: [*own, "--arm", name] for name in REGIMES}}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(given.rounds):
        for name, command in commands.items():
            found[name] += measure(command, server)
    return found


if __name__ == "__main__":
    main()
