"""Every prompt group has a fate: issued = trained + dropped(reason) + in flight, at any instant."""

import json
from collections import Counter
from pathlib import Path


class Ledger:
    """Counts groups and appends every event to a JSONL file, one object a line.

    `record` raises `ValueError` on an event that the group's past forbids: a group is issued once and
    then either trained or dropped, once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.issued: set[int] = set()
        self.trained: set[int] = set()
        self.dropped: dict[int, str] = {}
        self.num_reissued = 0
        if path.is_file():
            for line in path.read_text().splitlines():
                self._apply(**json.loads(line))

    def record(
        self,
        event: str,
        step: int,
        group_ids: list[int],
        reason: str | None = None,
        count: int = 0,
        message: str | None = None,
    ) -> None:
        """Apply and append one event: issued, trained, dropped (with a reason) or reissued (with a count).

        `message` is for people: what went wrong, in words.
        """
        entry = {"event": event, "step": step, "group_ids": group_ids, "reason": reason, "count": count}
        self._apply(event, step, group_ids, reason, count)
        if message:
            entry["message"] = message
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _apply(
        self, event: str, step: int, group_ids: list[int], reason: str | None, count: int, message: str | None = None
    ) -> None:
        groups = set(group_ids)
        if event == "issued":
            if known := groups & self.issued:
                raise ValueError(f"groups {sorted(known)} are issued a second time")
            self.issued |= groups
        elif event == "reissued":
            self.num_reissued += count
        elif event in ("trained", "dropped"):
            if strangers := groups - self.in_flight:
                raise ValueError(f"groups {sorted(strangers)} are {event} but not in flight")
            if event == "trained":
                self.trained |= groups
            else:
                self.dropped |= dict.fromkeys(groups, reason or "unknown")
        else:
            raise ValueError(f"no ledger event {event!r}; there are issued, reissued, trained, dropped")

    @property
    def in_flight(self) -> set[int]:
        return self.issued - self.trained - self.dropped.keys()

    def counts(self) -> dict[str, int]:
        """Numbers of groups by fate; `dropped/<reason>` for each reason, and episodes issued again."""
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
    """Forget the events of step `step` and later."""
    lines = path.read_text().splitlines() if path.is_file() else []
    kept = [line for line in lines if json.loads(line)["step"] < step]
    path.write_text("".join(line + "\n" for line in kept))
