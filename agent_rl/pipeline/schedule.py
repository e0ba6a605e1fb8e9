"""Which weights each rollout batch is sampled with, so that its lag is known beforehand."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Schedule:
    """Sampling of batch i starts when training on batch i - prefetch starts, with the last broadcast weights.

    Everything here is counted in steps: step i trains on batch i, and the weights of step i are those that it begins
    with. Their policy version counts optimizer steps: it is i times the updates per batch. With `broadcast_interval` 1
    batch i is trained at lag min(i, prefetch), in steps; with `prefetch` 1 and `broadcast_interval` n the lag cycles
    through 1..n. `waves`: the rollout must be bit-reproducible.

    `ramps`: pairs (first batch, step), in order. No batch from the first one on is sampled with weights older than
    those of the step. A fresh run has (0, 0). A run that continues with too few queued batches adds a pair.
    """

    prefetch: int
    broadcast_interval: int
    waves: bool = False
    ramps: tuple[tuple[int, int], ...] = ((0, 0),)

    def served(self, step: int) -> int:
        """The step whose weights the engines serve when the trainer holds those of `step`: the last broadcast."""
        return step - step % self.broadcast_interval

    def sampling_step(self, batch: int) -> int:
        """The step whose weights sample every token of `batch`."""
        oldest = [step for first, step in self.ramps if first <= batch][-1]
        return self.served(max(oldest, batch - self.prefetch))

    def continued(self, step: int, num_queued: int) -> "Schedule":
        """The schedule of a run that is resumed at `step` with `num_queued` batches sampled and not trained."""
        first_missing = step + num_queued
        if first_missing >= step + self.prefetch:
            return self
        return replace(self, ramps=(*self.ramps, (first_missing, step)))
