"""The keys under `watchdog`, `logging` and `ray` in a run's config."""

from typing import Literal

from pydantic import Field

from agent_rl.settings import Settings


class WatchdogConfig(Settings):
    """What happens if a run makes no progress."""

    after_s: float | None = Field(1800.0, gt=0)
    """Seconds without progress: no episode advances and no step ends. Set it above the longest step and the longest
    generation. null turns the watchdog off."""
    policy: Literal["warn", "stop"] = "warn"
    """`warn` prints where the run is stuck to stderr and writes all stacks to stacks/ in the run directory, once for
    each stall. `stop` ends the run instead, with the same message and stacks; `--resume` continues from its newest
    checkpoint."""


class LoggingConfig(Settings):
    """Where figures are logged besides metrics.jsonl and the TensorBoard files, which every run writes."""

    wandb: str | None = None
    """A Weights & Biases project; needs the package of the extra `wandb`. null does not log to W&B."""
    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run directory; `wandb sync` uploads it later."""


class RayConfig(Settings):
    """Which Ray cluster a run uses, and how its actors are placed there."""

    address: str | None = None
    """The cluster to join: HOST:PORT, or `auto` for the one that this machine belongs to. null starts Ray on this
    machine for this run alone; `placement` and `patience_s` then have no effect."""
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """Ray's strategy for the places of trainer and rollout workers: `pack` on few nodes, `spread` on many; `strict_`
    fails if that is not possible. Places are reserved before the run starts."""
    trainer_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for the trainer, in equal parts for its ranks, which are all on one node. 0 trains on the
    CPU."""
    worker_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for each rollout worker."""
    patience_s: float = Field(120.0, gt=0)
    """Seconds that a run waits for its places before it stops with a message."""
