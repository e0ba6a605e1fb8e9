"""The ledger of prompt groups: at any time, issued = trained + dropped + in flight."""

import json
import os
from collections import Counter
from pathlib import Path

from agent_rl.jsonl import read_jsonl, rewrite_jsonl


class Ledger:
    """Tracks groups and appends every event to a JSONL file, one object a line.

    `record` raises `ValueError` if an event contradicts earlier ones: a group is issued once, and then trained or
    dropped once. Opening a file removes an incomplete last line, which a crash may leave.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.issued: set[int] = set()
        self.in_flight: set[int] = set()
        self.trained: set[int] = set()
        self.dropped: dict[int, str] = {}
        self.num_reissued = 0
        entries = read_jsonl(path)
        for entry in entries:
            self._apply(**entry)
        rewrite_jsonl(path, entries)

    def record(
        self,
        event: str,
        step: int,
        group_ids: list[int],
        reason: str | None = None,
        count: int = 0,
        message: str | None = None,
    ) -> None:
        """Apply and append one event: issued, trained, dropped (with `reason`) or reissued (with `count`, of episodes).

        `message`: what went wrong, in words.
        """
        entry = {"event": event, "step": step, "group_ids": group_ids, "reason": reason, "count": count}
        self._apply(event, step, group_ids, reason, count)
        if message:
            entry["message"] = message
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def sync(self) -> None:
        """Wait until every event is on the disk, since a checkpoint must not be newer than the ledger."""
        with self._path.open("a") as file:
            os.fsync(file.fileno())

    def _apply(
        self, event: str, step: int, group_ids: list[int], reason: str | None, count: int, message: str | None = None
    ) -> None:
        groups = set(group_ids)
        if event == "issued":
            if known := groups & self.issued:
                raise ValueError(f"groups {sorted(known)} are issued a second time")
            self.issued |= groups
            self.in_flight |= groups
        elif event == "reissued":
            self.num_reissued += count
        elif event in ("trained", "dropped"):
            if strangers := groups - self.in_flight:
                raise ValueError(f"groups {sorted(strangers)} are {event} but not in flight")
            self.in_flight -= groups
            if event == "trained":
                self.trained |= groups
            else:
                self.dropped |= dict.fromkeys(groups, reason or "unknown")
        else:
            raise ValueError(f"no ledger event {event!r}; there are issued, reissued, trained, dropped")
        self._check_sum()

    def _check_sum(self) -> None:
        fates = len(self.trained) + len(self.dropped) + len(self.in_flight)
        assert len(self.issued) == fates, f"{len(self.issued)} groups are issued, but {fates} have a fate"

    def counts(self) -> dict[str, int]:
        """The number of groups by event, `dropped/<reason>` for each reason, and the number of reissued episodes."""
        reasons = Counter(self.dropped.values())
        return {
            "issued": len(self.issued),
            "trained": len(self.trained),
            "dropped": len(self.dropped),
            "in_flight": len(self.in_flight),
            "episodes_reissued": self.num_reissued,
            **{f"dropped/{reason}": number for reason, number in reasons.items()},
        }


def truncate_ledger(path: Path, step: int) -> None:
    """Remove the events of `step` and later steps."""
    rewrite_jsonl(path, [entry for entry in read_jsonl(path) if entry["step"] < step])
