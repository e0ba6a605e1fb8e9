"""Which of the groups that were sampled for a batch are trained on, and why the others are not."""

from collections import defaultdict
from dataclasses import dataclass

from agent_rl.records import Episode
from agent_rl.rollout.worker import RolloutResult

NO_SPREAD = "no_spread"


@dataclass(frozen=True)
class Selection:
    """`kept` episodes by episode id; `dropped` groups with the reason; `message` of the first failure, if any."""

    kept: list[Episode]
    dropped: dict[int, str]
    message: str = ""

    @property
    def num_kept_groups(self) -> int:
        return len({episode.trajectory.group_id for episode in self.kept})


def select_groups(results: list[RolloutResult], drop_without_spread: bool) -> Selection:
    """Keep the groups that are whole and, with dynamic sampling, whose outcomes are not all the same.

    Dynamic sampling as in DAPO (arXiv 2503.14476, section 3.2): without spread every advantage is 0.
    """
    episodes = sorted_episodes(results)
    failures = [failure for result in results for failure in result.failed]
    dropped = {failure.task.group_id: failure.kind for failure in failures}
    if drop_without_spread:
        outcomes: dict[int, set[float]] = defaultdict(set)
        for episode in episodes:
            outcomes[episode.trajectory.group_id].add(episode.trajectory.reward_parts["outcome"])
        flat = {group for group, seen in outcomes.items() if len(seen) == 1}
        dropped |= dict.fromkeys(sorted(flat - dropped.keys()), NO_SPREAD)
    kept = [episode for episode in episodes if episode.trajectory.group_id not in dropped]
    return Selection(kept, dropped, failures[0].message if failures else "")


def keep_without_spread(selection: Selection, first: list[RolloutResult]) -> Selection:
    """A selection that kept nothing, with the whole groups of the `first` round kept after all."""
    kept = select_groups(first, drop_without_spread=False).kept
    groups = {episode.trajectory.group_id for episode in kept}
    dropped = {group: reason for group, reason in selection.dropped.items() if group not in groups}
    return Selection(kept, dropped, selection.message)


def sorted_episodes(results: list[RolloutResult]) -> list[Episode]:
    """All episodes, by episode id."""
    return sorted((e for result in results for e in result.episodes), key=lambda e: e.trajectory.episode_id)
