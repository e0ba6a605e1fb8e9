"""issued = trained + dropped + in flight, at any instant and after reading the file again."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agent_rl.pipeline.ledger import Ledger, truncate_ledger


class LedgerMachine(RuleBasedStateMachine):
    """Arrivals, failures, duplicates, checkpoints, crashes with a torn line, and restarts, against plain sets."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.jsonl"
        self.ledger, self.step = Ledger(self.path), 0
        self.issued: set[int] = set()
        self.fates: dict[int, str] = {}
        self.checkpoint = (0, set[int](), dict[int, str]())

    @rule(number=st.integers(0, 3))
    def issue(self, number: int) -> None:
        groups = range(len(self.issued), len(self.issued) + number)
        self.ledger.record("issued", self.step, list(groups))
        self.issued |= set(groups)

    @rule(data=st.data(), fate=st.sampled_from(["trained", "overdue", "SessionLost"]))
    def arrive(self, data: st.DataObject, fate: str) -> None:
        if waiting := sorted(self.issued - self.fates.keys()):
            groups = data.draw(st.lists(st.sampled_from(waiting), unique=True))
            event, reason = ("trained", None) if fate == "trained" else ("dropped", fate)
            self.ledger.record(event, self.step, groups, reason=reason)
            self.fates |= dict.fromkeys(groups, fate)

    @rule(data=st.data(), event=st.sampled_from(["issued", "trained", "dropped"]))
    def arrive_twice(self, data: st.DataObject, event: str) -> None:
        if self.fates:
            group = data.draw(st.sampled_from(sorted(self.fates)))
            with pytest.raises(ValueError, match=f"groups \\[{group}\\] are"):
                self.ledger.record(event, self.step, [group], reason="again")

    @rule()
    def finish_step(self) -> None:
        self.step += 1
        self.ledger.sync()
        self.checkpoint = (self.step, set(self.issued), dict(self.fates))

    @rule(torn=st.sampled_from(["", '{"event": "trained", "st', '{"event": "issued"']))
    def crash(self, torn: str) -> None:
        with self.path.open("a") as file:
            file.write(torn)
        self.step, issued, fates = self.checkpoint
        self.issued, self.fates = set(issued), dict(fates)
        truncate_ledger(self.path, self.step)
        self.ledger = Ledger(self.path)

    @invariant()
    def every_group_has_one_fate(self) -> None:
        if not hasattr(self, "ledger"):
            return
        trained = {group for group, fate in self.fates.items() if fate == "trained"}
        assert (self.ledger.issued, self.ledger.trained) == (self.issued, trained)
        assert self.ledger.in_flight == self.issued - self.fates.keys()
        assert self.ledger.dropped == {group: fate for group, fate in self.fates.items() if fate != "trained"}
        assert Ledger(self.path).counts() == self.ledger.counts()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_torn_last_line_is_cut_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path).record("issued", 0, [1, 2])
    with path.open("a") as file:
        file.write('{"event": "trai')
    again = Ledger(path)
    again.record("trained", 1, [1])
    assert Ledger(path).in_flight == {2}
    path.write_text('{"event"\n' + path.read_text())
    with pytest.raises(ValueError, match=r"ledger.jsonl, line 1, is not JSON"):
        Ledger(path)


@given(st.lists(st.tuples(st.sampled_from(["issued", "trained", "dropped"]), st.sets(st.integers(0, 9)))))
def test_every_group_has_one_fate_whatever_arrives(events: list[tuple[str, set[int]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        ledger, refused = Ledger(path), 0
        for step, (event, groups) in enumerate(events):
            before = ledger.counts()
            try:
                ledger.record(event, step, sorted(groups), reason="why" if event == "dropped" else None)
            except ValueError:
                refused += 1
                assert ledger.counts() == before
            counts = ledger.counts()
            assert counts["issued"] == counts["trained"] + counts["dropped"] + counts["in_flight"]
            assert not ledger.trained & ledger.dropped.keys()
        assert Ledger(path).counts() == ledger.counts()


def test_impossible_events_are_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record("issued", 0, [1, 2])
    with pytest.raises(ValueError, match=r"groups \[2\] are issued a second time"):
        ledger.record("issued", 1, [2, 3])
    ledger.record("trained", 1, [1])
    with pytest.raises(ValueError, match=r"groups \[1\] are trained but not in flight"):
        ledger.record("trained", 2, [1])
    with pytest.raises(ValueError, match="no ledger event 'lost'"):
        ledger.record("lost", 2, [2])


def test_truncating_brings_groups_back_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.record("issued", -1, [1])
    ledger.record("issued", 0, [2])
    ledger.record("trained", 0, [1])
    ledger.record("dropped", 1, [2], reason="infrastructure")
    ledger.record("reissued", 1, [], count=4)
    assert ledger.counts()["dropped/infrastructure"] == 1
    truncate_ledger(path, 1)
    again = Ledger(path)
    assert (again.trained, again.in_flight, again.num_reissued) == ({1}, {2}, 0)
