"""issued = trained + dropped + in flight, at any instant and after reading the file again."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.pipeline.ledger import Ledger, truncate_ledger


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
