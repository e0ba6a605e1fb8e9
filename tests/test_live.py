"""What is shown of a run while it goes on."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from agent_rl import live
from agent_rl.live import LiveView


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_that_is_shown_again_measures_the_pace_anew(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """A run whose trainer died goes back to a checkpoint and shows a step that it has shown."""
    now = iter([100.0, 110.0, 200.0, 207.0, 300.0])
    monkeypatch.setattr(live.time, "monotonic", lambda: next(now))
    view = LiveView(Console(file=io.StringIO(), force_terminal=terminal), "run", num_steps=10)
    left = [view._time_left(step) for step in (2, 3, 2, 3, 1)]
    assert left == ["", "1:00 left", "", "0:42 left", ""]


def test_rows_of_a_step_that_is_done_twice_are_both_printed() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out), "run", num_steps=3)
    for step in (0, 0, 1):
        view.show({"step": step, "reward_mean": 0.5})
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["step 0  reward 0.500"] * 2
    assert lines[2].startswith("step 1  reward 0.500  0:00 left")


@pytest.mark.parametrize("terminal", [False, True])
def test_what_has_become_of_every_group_is_shown(terminal: bool) -> None:
    out = io.StringIO()
    fates = {"groups/issued": 9, "groups/trained": 4, "groups/dropped": 2, "groups/in_flight": 3}
    with LiveView(Console(file=out, force_terminal=terminal, width=120), "run", num_steps=3) as view:
        view.show({"step": 0, "reward_mean": 0.5} | fates)
    assert "groups: 9 issued = 4 trained + 2 dropped + 3 in flight" in Text.from_ansi(out.getvalue()).plain
