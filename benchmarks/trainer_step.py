"""Tokens per CPU-second of a training step, against a plain Hugging Face loop over padded rows.

The same trajectories, of a realistic multi-turn length mix, the same model, PPO loss and AdamW, on one thread. The
loop takes rows of a fixed number in the order they come, padded to the longest, with logits at every position. Ours
also computes what a run records: mismatch tables, the bound's audit, entropies.
Usage: python -m benchmarks.trainer_step [REPEATS]
"""

import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agent_rl.config import model_directory
from agent_rl.objective.advantage import group_advantages
from agent_rl.objective.config import ObjectiveConfig
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

VOCABULARY, PROMPT, EPISODES, GROUP, ROWS, LONGEST, TOKENS = 4096, 48, 32, 8, 8, 1024, 4096


def trajectory(rng: np.random.Generator, episode_id: int) -> Trajectory:
    """A geometric number of turns, log-normal tokens a turn, tool output between: a few episodes are very long."""
    builder = TrajectoryBuilder()
    builder.append(rng.integers(0, VOCABULARY, PROMPT), -1)
    for turn in range(min(int(rng.geometric(0.3)), 12)):
        room = LONGEST - len(builder.token_ids)
        ids = rng.integers(0, VOCABULARY, min(int(rng.lognormal(3.8, 0.6)) + 1, room)).astype(np.int32)
        if not len(ids):
            break
        logprobs, versions = np.full(len(ids), -9.0, np.float32), np.zeros(len(ids), np.int32)
        mask = SamplingMask.full(len(ids))
        builder.append(ids, turn, Completion(ids, logprobs, mask, versions, FinishReason.STOP))
        tool = rng.integers(0, VOCABULARY, min(int(rng.lognormal(3.0, 0.8)), LONGEST - len(builder.token_ids)))
        builder.append(tool, turn)
    return builder.build(
        group_id=episode_id // GROUP,
        episode_id=episode_id,
        attempt=0,
        sampling_params=SamplingParams(),
        reward=float(rng.integers(0, 2)),
        reward_parts={},
        stop_reason=StopReason.ANSWER,
    )


def save_model(directory: str) -> None:
    """A random Qwen3 of 1.9 million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONGEST,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(model_directory("builtin:tiny-qwen3")).save_pretrained(directory)


class PaddedLoop:
    """What one would write first: pad, forward, log-softmax, PPO's loss, backward, step."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, trajectories: list[Trajectory]) -> float:
        """The loss; sequence means, as the default objective has them."""
        rewards = torch.tensor([t.reward for t in trajectories])
        advantages = group_advantages(
            rewards, torch.tensor([t.group_id for t in trajectories]), ObjectiveConfig().advantage, rewards
        )
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for first in range(0, len(trajectories), ROWS):
            rows = trajectories[first : first + ROWS]
            longest = max(map(len, rows))

            def padded(name: str, fill: float, rows: list[Trajectory] = rows, n: int = longest) -> torch.Tensor:
                return torch.tensor(
                    np.stack([np.pad(getattr(t, name), (0, n - len(t)), constant_values=fill) for t in rows])
                )

            ids, mask = padded("token_ids", 0).long(), padded("loss_mask", False)[:, 1:]
            attention = (torch.arange(longest) < torch.tensor([len(t) for t in rows])[:, None]).long()
            logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
            ratio = (logprobs - padded("behavior_logprobs", 0.0)[:, 1:].nan_to_num()).exp()
            advantage = advantages[first : first + ROWS, None]
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = -((objective * mask).sum(1) / mask.sum(1)).sum() / len(trajectories)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


def rates(actions: dict[str, Callable[[], object]], tokens: int, repeats: int) -> dict[str, list[float]]:
    """Tokens per CPU-second of each action, taken in turn so that neighbours on the machine meet both alike."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            started = time.process_time()
            action()
            found[name].append(tokens / (time.process_time() - started))
    return found


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    trajectories = [trajectory(rng, i) for i in range(EPISODES)]
    lengths = np.array([len(t) for t in trajectories])
    objective = check(ObjectiveConfig, {"clip": {"type": "ppo", "eps_low": 0.2, "eps_high": 0.2}})
    with tempfile.TemporaryDirectory() as path:
        save_model(path)
        loop = PaddedLoop(path)
        trainer = TorchEngine(TorchEngine.Config(max_tokens_per_microbatch=TOKENS), path, objective)
    losses = loop.step(trajectories), trainer.train(trajectories, 0).metrics["loss"]
    actions: dict[str, Callable[[], object]] = {
        "padded loop": lambda: loop.step(trajectories),
        "trainer": lambda: trainer.train(trajectories, 1),
    }
    found = rates(actions, int(lengths.sum()), repeats)
    console = Console(width=120)
    padding = [lengths[i : i + ROWS].max() * ROWS for i in range(0, EPISODES, ROWS)]
    console.print(
        f"{EPISODES} episodes of {lengths.min()} to {lengths.max()} tokens, mean {lengths.mean():.0f}; "
        f"padded rows are {1 - lengths.sum() / sum(padding):.0%} padding; losses {losses[0]:.6f}, {losses[1]:.6f}"
    )
    table = Table("step", "tokens per CPU-second", "least", "most")
    for name, values in found.items():
        table.add_row(name, f"{np.median(values):.0f}", f"{min(values):.0f}", f"{max(values):.0f}")
    console.print(table)
    ratios = [own / other for own, other in zip(found["trainer"], found["padded loop"], strict=True)]
    console.print(f"trainer / padded loop: {np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
