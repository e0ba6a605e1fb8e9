"""Which policy version each rollout batch is sampled with: lag as a promise, not as an accident."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Batch i starts being sampled when batch i - prefetch starts being trained, with the last broadcast weights.

    One optimizer step a batch, so the step that trains batch i has policy version i. With
    `broadcast_interval` 1 every batch is trained at lag min(i, prefetch) exactly; with `prefetch` 1 and
    `broadcast_interval` n the lag cycles through 1..n. `waves` asks the rollout to be bit-reproducible.
    `ramp_from`: the step that the queue was empty at, 0 unless a run that had ended was extended.
    """

    prefetch: int
    broadcast_interval: int
    waves: bool = False
    ramp_from: int = 0

    def served(self, policy_version: int) -> int:
        """The version that engines serve while the trainer holds `policy_version`: the last one broadcast."""
        return policy_version - policy_version % self.broadcast_interval

    def version(self, batch: int) -> int:
        """The version that every token of batch `batch` is sampled with."""
        return self.served(max(self.ramp_from, batch - self.prefetch))
