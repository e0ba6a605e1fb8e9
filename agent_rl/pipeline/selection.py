"""Which of the sampled groups are trained on, and why the others are dropped."""

from collections import defaultdict
from dataclasses import dataclass

from agent_rl.records import Episode, Trajectory
from agent_rl.rollout.worker import RolloutResult

NO_SPREAD = "no_spread"


@dataclass(frozen=True)
class Selection:
    """`kept`: the episodes to train on, by episode id, without masked ones. `dropped`: (reason, message) by group.

    `num_whole`: groups of which no episode failed, kept or not.
    """

    kept: list[Episode]
    dropped: dict[int, tuple[str, str]]
    num_whole: int

    @property
    def num_kept_groups(self) -> int:
        """The number of groups that have kept episodes."""
        return len({episode.trajectory.group_id for episode in self.kept})


def select_groups(results: list[RolloutResult], drop_without_spread: bool) -> Selection:
    """Keep the groups of which no episode failed and at least two are not masked.

    `drop_without_spread`: also drop those whose outcomes are all equal, as DAPO's dynamic sampling does (arXiv
    2503.14476, section 3.2), since every advantage in them is 0.
    """
    episodes = sorted_episodes(results)
    dropped = {f.task.group_id: (f.kind, f.message) for result in results for f in result.failed}
    whole = [e.trajectory for e in episodes if e.trajectory.group_id not in dropped]
    dropped |= masked_groups(whole)
    trained = [t for t in whole if t.group_id not in dropped and t.mask_reason is None]
    if drop_without_spread:
        outcomes: dict[int, set[float]] = defaultdict(set)
        for trajectory in trained:
            outcomes[trajectory.group_id].add(trajectory.outcome)
        dropped |= {g: (NO_SPREAD, "its outcomes are all the same") for g, seen in outcomes.items() if len(seen) == 1}
    kept = [e for e in episodes if e.trajectory.group_id not in dropped and e.trajectory.mask_reason is None]
    return Selection(kept, dropped, len({t.group_id for t in whole}))


def keep_without_spread(selection: Selection, first: list[RolloutResult]) -> Selection:
    """A selection that kept nothing, but with the groups of the `first` round kept that only lack spread."""
    kept = select_groups(first, drop_without_spread=False).kept
    groups = {episode.trajectory.group_id for episode in kept}
    dropped = {group: why for group, why in selection.dropped.items() if group not in groups}
    return Selection(kept, dropped, selection.num_whole)


def masked_groups(trajectories: list[Trajectory]) -> dict[int, tuple[str, str]]:
    """(reason, message) of each group that has masked episodes and fewer than two others."""
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group_id].append(trajectory)
    found = {}
    for group_id, members in groups.items():
        reasons = [t.mask_reason for t in members if t.mask_reason is not None]
        if reasons and len(members) - len(reasons) < 2:
            found[group_id] = (f"masked_{reasons[0]}", f"{len(reasons)} of {len(members)} episodes are masked")
    return found


def sorted_episodes(results: list[RolloutResult]) -> list[Episode]:
    """All episodes of `results`, by episode id."""
    return sorted((e for result in results for e in result.episodes), key=lambda e: e.trajectory.episode_id)
