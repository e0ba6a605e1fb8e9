"""What SAT and the diagnostics cost, per sampled token, against a quickstart training step's own cost per token.

The costs are measured on one packed batch of a million sampled tokens, the training step on trajectories as
long as the quickstart's, all in one run on one thread.
Usage: python -m benchmarks.objective_cost [REPEATS]
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from agent_rl.config import model_directory
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.loss import LossOutput, Objective
from agent_rl.objective.metrics import step_metrics
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.records import (
    Completion,
    FinishReason,
    SamplingMask,
    SamplingParams,
    StopReason,
    Trajectory,
    TrajectoryBuilder,
)
from agent_rl.settings import check
from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.trainer.mismatch import mismatch_rows, step_tokens
from agent_rl.trainer.packing import pack
from agent_rl.trainer.token_logprobs import token_logprobs

VOCABULARY, PROMPT, TURNS, TURN, TOOL = 105, 20, 4, 17, 6


def trajectory(rng: np.random.Generator, episode_id: int) -> Trajectory:
    """About as long as the quickstart's: four turns, 68 sampled tokens of 112."""
    builder = TrajectoryBuilder()
    builder.append(rng.integers(0, VOCABULARY, PROMPT), -1)
    for turn in range(TURNS):
        ids = rng.integers(0, VOCABULARY, TURN).astype(np.int32)
        logprobs = (-rng.random(TURN) * 3).astype(np.float32)
        versions = np.zeros(TURN, np.int32)
        builder.append(ids, turn, Completion(ids, logprobs, SamplingMask.full(TURN), versions, FinishReason.STOP))
        builder.append(rng.integers(0, VOCABULARY, TOOL), turn)
    return builder.build(
        group_id=episode_id // 8,
        episode_id=episode_id,
        attempt=0,
        sampling_params=SamplingParams(),
        reward=float(rng.integers(0, 2)),
        reward_parts={},
        stop_reason=StopReason.ANSWER,
    )


def seconds(action: Callable[[], object], repeats: int) -> float:
    """Median CPU time of `action`, after one run to warm up."""
    action()
    found = []
    for _ in range(repeats):
        started = time.process_time()
        action()
        found.append(time.process_time() - started)
    return median(found)


def costs(batch: TokenBatch, logprobs: torch.Tensor, repeats: int) -> dict[str, float]:
    """Seconds of each piece on the large batch. A clip's loss is timed with and without SAT; the rest is PPO's own."""
    sat, ppo = (Objective(check(ObjectiveConfig, {"clip": clip})) for clip in ("sat", "ppo"))
    steps = {o: o.begin_step([batch], [logprobs]) for o in (sat, ppo)}
    outputs: dict[Objective, LossOutput] = {o: o.loss(logprobs, batch, steps[o]) for o in (sat, ppo)}

    def diagnose() -> None:
        tokens = step_tokens([batch], [logprobs], [logprobs.abs()], [outputs[sat]], 1)
        mismatch_rows(tokens, None)

    with torch.no_grad():
        quantile = {o: seconds(lambda o=o: o.begin_step([batch], [logprobs]), repeats) for o in (sat, ppo)}  # type: ignore[misc]
        loss = {o: seconds(lambda o=o: o.loss(logprobs, batch, steps[o]), repeats) for o in (sat, ppo)}  # type: ignore[misc]
        return {
            "SAT: quantile and radii": quantile[sat] - quantile[ppo] + loss[sat] - loss[ppo],
            "step metrics": seconds(lambda: step_metrics([batch], [outputs[sat]], step=steps[sat]), repeats),
            "mismatch table (overall, turns, lags, turns by number of turns)": seconds(diagnose, repeats),
        }


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    small = [trajectory(rng, i) for i in range(128)]
    sampled = sum(int(t.loss_mask.sum()) for t in small)
    config = TorchEngine.Config(max_tokens_per_microbatch=16384, learning_rate=1e-9)
    trainer = TorchEngine(config, str(model_directory("builtin:tiny-qwen3")), ObjectiveConfig())
    step = seconds(lambda: trainer.train(small, 0), repeats) / sampled
    packed = pack(small, [0.0] * len(small))
    with torch.no_grad():
        no_grad = seconds(lambda: token_logprobs(trainer.model, packed), repeats) / sampled

    large = pack(
        [trajectory(rng, i) for i in range(1_000_000 // (TURNS * TURN))], [1.0] * (1_000_000 // (TURNS * TURN))
    )
    noise = torch.from_numpy(rng.normal(0, 0.05, len(large)).astype(np.float32))
    logprobs = (large.behavior_logprobs.nan_to_num(0.0) + noise).clamp(max=0.0)
    tokens = len(large.active)
    table = Table("piece", "ns a sampled token", "of a training step")
    for name, spent in costs(large, logprobs, repeats).items():
        table.add_row(name, f"{1e9 * spent / tokens:,.0f}", f"{spent / tokens / step:.1%}")
    table.add_row(
        "pass without gradients, for scope step with several micro-batches",
        f"{1e9 * no_grad:,.0f}",
        f"{no_grad / step:.1%}",
    )
    table.add_row("training step", f"{1e9 * step:,.0f}", "100 %")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
