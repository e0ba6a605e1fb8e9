"""When a group may be issued, and which groups a step trains on, so that no token is older than `max_lag`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pacing:
    """One optimizer step trains on `batch_groups` groups, so the step j has policy version j.

    A group that is issued at version v samples every token at v or later, so it must be trained by step
    v + `max_lag`: its last step. Admission as in AReaL (arXiv 2505.24298, section 5.1): the groups issued by version
    v, those dropped left out, are at most (v + max_lag + 1) x batch_groups, which is what the steps up to
    v + max_lag train on.

    That suffices when groups are trained in the order of their issue. A group that is trained ahead of its turn
    takes a place from an older one; `choose` lets it do so only while all others can still be trained in time.
    """

    batch_groups: int
    max_lag: int
    max_groups: int
    """The most groups in flight and queued at once."""
    num_steps: int
    wait: bool
    """Whether a step waits for a group whose last step it is; otherwise the group is dropped."""

    waves = False
    """Arrivals decide what is trained when, so nothing is to be bit-reproducible."""

    def served(self, policy_version: int) -> int:
        """Every version is broadcast."""
        return policy_version

    def room(self, version: int, num_issued: int, num_waiting: int) -> int:
        """How many groups may be issued at `version`; `num_issued` leaves dropped groups out."""
        steps = min(version + self.max_lag + 1, self.num_steps)
        return max(0, min(steps * self.batch_groups - num_issued, self.max_groups - num_waiting))

    def choose(self, step: int, versions: Mapping[int, int], arrived: Sequence[int]) -> list[int] | None:
        """The groups that `step` trains on, ascending; None while they have not all arrived.

        `versions`: the issue version of every group in flight or arrived. `arrived`: those that are sampled,
        in the order of their arrival. The earliest are taken that leave every group a step in time.
        """
        chosen: list[int] = []
        for last, need in self._needs(step, versions):
            ready = [g for g in arrived if versions[g] + self.max_lag <= last and g not in chosen]
            missing = need - len(chosen)
            if missing > len(ready) and self.wait:
                return None
            chosen += ready[: max(missing, 0)]
        chosen += [group for group in arrived if group not in chosen][: self.batch_groups - len(chosen)]
        return sorted(chosen) if len(chosen) == self.batch_groups else None

    def overdue(self, step: int, versions: Mapping[int, int], chosen: Sequence[int]) -> list[int]:
        """The groups that can no longer be trained in time once `step` trains on `chosen`."""
        late = [g for g, version in versions.items() if version + self.max_lag <= step and g not in chosen]
        assert not (late and self.wait), f"step {step} leaves groups {late} behind, although it should have waited"
        return late

    def _needs(self, step: int, versions: Mapping[int, int]) -> list[tuple[int, int]]:
        """For each last step: how many of the groups up to it this step must take, for the others to fit in."""
        needs = []
        for last in range(step, step + self.max_lag + 1):
            due = sum(version + self.max_lag <= last for version in versions.values())
            need = due - (last - step) * self.batch_groups
            assert not self.wait or need <= self.batch_groups, f"{due} groups must be trained by step {last}"
            needs.append((last, min(need, self.batch_groups)))
        return needs
