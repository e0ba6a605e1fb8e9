"""Which policy version each rollout batch is sampled with: lag as a promise, not as an accident."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Schedule:
    """Batch i starts being sampled when batch i - prefetch starts being trained, with the last broadcast weights.

    Versions are counted in batches here: the step that trains batch i has version i. Where a batch is used for U
    updates, its policy version, which counts optimizer steps, is U times that. With `broadcast_interval` 1 every
    batch is trained at lag min(i, prefetch) exactly; with `prefetch` 1 and `broadcast_interval` n the lag cycles
    through 1..n. `waves` asks the rollout to be bit-reproducible.

    `ramps`: (first batch, policy version) pairs, in order. From that batch on nothing was queued at that
    version, so no batch can be older. A fresh run has (0, 0); extending a run that had ended adds one.
    """

    prefetch: int
    broadcast_interval: int
    waves: bool = False
    ramps: tuple[tuple[int, int], ...] = ((0, 0),)

    def served(self, policy_version: int) -> int:
        """The version that engines serve while the trainer holds `policy_version`: the last one broadcast."""
        return policy_version - policy_version % self.broadcast_interval

    def version(self, batch: int) -> int:
        """The version that every token of batch `batch` is sampled with."""
        oldest = [version for first, version in self.ramps if first <= batch][-1]
        return self.served(max(oldest, batch - self.prefetch))

    def continued(self, step: int, num_queued: int) -> "Schedule":
        """The schedule of a run that goes on at `step` with that many batches queued."""
        first_missing = step + num_queued
        if first_missing >= step + self.prefetch:
            return self
        return replace(self, ramps=(*self.ramps, (first_missing, step)))
