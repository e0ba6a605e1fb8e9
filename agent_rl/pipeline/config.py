"""How a run is watched, logged and placed: the keys under `watchdog`, `logging` and `ray` in a run's config."""

from typing import Literal

from pydantic import Field

from agent_rl.settings import Settings


class WatchdogConfig(Settings):
    """What happens when a run stands still."""

    after_s: float | None = Field(1800.0, gt=0)
    """Seconds in which no episode gets further, no step ends and the trainer is at the same step: no progress. Keep it
    above the longest optimizer step and the longest generation. null never looks."""
    policy: Literal["warn", "stop"] = "warn"
    """`warn` says on stderr what the run is stuck in and writes all stacks to stacks/ in the run directory, once for
    each standstill. `stop` does so and ends the run; `--resume` goes on from its newest checkpoint."""


class LoggingConfig(Settings):
    """Where figures go besides metrics.jsonl and the TensorBoard files, which every run writes."""

    wandb: str | None = None
    """A Weights & Biases project to log to, with the package of the extra `wandb`; null logs nowhere else."""
    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run directory; `wandb sync` sends it later."""
