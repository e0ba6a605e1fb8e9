"""When groups are issued and which ones a step trains on, so that no token exceeds `max_lag`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pacing:
    """Bounds the lag of groups that are issued without a pause. Step j trains on `batch_groups` groups.

    Everything here is counted in steps; a step may be several optimizer steps and so several policy versions. A group
    issued while the engines serve the weights of step v has no token of older weights. It must be trained by step
    v + `max_lag`, its last step. Admission is as in AReaL (arXiv 2505.24298, section 5.1): the groups issued by then,
    without the dropped ones, are at most (v + max_lag + 1) x batch_groups, as many as the steps up to v + max_lag
    train on.

    This suffices if groups are trained in the order of issue. A group that is trained early takes the place of an
    older one; `choose` allows it only if all others can still be trained in time.
    """

    batch_groups: int
    max_lag: int
    max_groups: int
    """Bound on the groups that are in flight or queued."""
    num_steps: int
    wait: bool
    """Whether a step waits for a group whose last step it is. Otherwise the group is dropped."""

    waves = False
    """The order of arrival decides what is trained when, so a run is not bit-reproducible."""

    def served(self, step: int) -> int:
        """The step whose weights the engines serve when the trainer holds those of `step`: all are broadcast."""
        return step

    def room(self, served: int, num_issued: int, num_waiting: int) -> int:
        """How many groups may be issued while the engines serve the weights of step `served`.

        `num_issued`: groups issued so far, without the dropped ones. `num_waiting`: groups in flight or queued.
        """
        steps = min(served + self.max_lag + 1, self.num_steps)
        return max(0, min(steps * self.batch_groups - num_issued, self.max_groups - num_waiting))

    def choose(self, step: int, issue_steps: Mapping[int, int], arrived: Sequence[int]) -> list[int] | None:
        """The groups that `step` trains on, ascending; None if they have not all arrived.

        `issue_steps`: for every group in flight or arrived, the step whose weights were served at its issue.
        `arrived`: the sampled ones, in the order of arrival. Takes the earliest arrivals with which every group still
        gets a step in time.
        """
        chosen: list[int] = []
        for last, need in self._needs(step, issue_steps):
            ready = [g for g in arrived if issue_steps[g] + self.max_lag <= last and g not in chosen]
            missing = need - len(chosen)
            if missing > len(ready) and self.wait:
                return None
            chosen += ready[: max(missing, 0)]
        chosen += [group for group in arrived if group not in chosen][: self.batch_groups - len(chosen)]
        return sorted(chosen) if len(chosen) == self.batch_groups else None

    def overdue(self, step: int, issue_steps: Mapping[int, int], chosen: Sequence[int]) -> list[int]:
        """The groups that cannot be trained in time any more if `step` trains on `chosen`."""
        late = [g for g, issued in issue_steps.items() if issued + self.max_lag <= step and g not in chosen]
        assert not (late and self.wait), f"step {step} leaves groups {late} behind, although it should have waited"
        return late

    def _needs(self, step: int, issue_steps: Mapping[int, int]) -> list[tuple[int, int]]:
        """For each last step: how many of the groups due by then `step` must take, since later steps cannot."""
        needs = []
        for last in range(step, step + self.max_lag + 1):
            due = sum(issued + self.max_lag <= last for issued in issue_steps.values())
            need = due - (last - step) * self.batch_groups
            assert not self.wait or need <= self.batch_groups, f"{due} groups must be trained by step {last}"
            needs.append((last, min(need, self.batch_groups)))
        return needs
