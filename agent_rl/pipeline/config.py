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


class RayConfig(Settings):
    """Which Ray a run uses, and how its actors are placed there."""

    address: str | None = None
    """A cluster to join: `auto` for one that this machine belongs to, or HOST:PORT. null starts a Ray for this run
    alone, on this machine; what is below, except for GPUs, is for clusters."""
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """Ray's strategy for the places of trainer and rollout workers: on few nodes or on many, `strict` without
    exception. Places are reserved before the run starts."""
    trainer_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for the trainer, in equal parts for its ranks, which are all on one node. With 0 it trains
    on the CPU."""
    worker_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for each rollout worker."""
    patience_s: float = Field(120.0, gt=0)
    """How long a run waits for its places before it stops with a message."""
