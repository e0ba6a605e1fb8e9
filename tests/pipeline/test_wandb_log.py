"""W&B by one key: offline files hold every row, a resumed run keeps its id, and a missing package is one sentence."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent_rl.pipeline.wandb_log import ID_FILE, wandb_log
from agent_rl.run import train
from tests.configs import quickstart


def test_without_the_key_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    rows: list[dict[str, Any]] = []
    with wandb_log(quickstart(), tmp_path, rows.append) as on_row:
        on_row({"step": 0})
    assert rows == [{"step": 0}]


def test_a_missing_package_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"install it with .pip install 'agent-rl\[wandb\]'"):
        train(quickstart("logging.wandb=chains"), tmp_path / "run", False, lambda row: None)
    assert not (tmp_path / "run").exists()


def when_closed(file: Path) -> bytes:
    """W&B's service closes a file a moment after the run has ended; before, it holds the seven bytes of its header."""
    deadline = time.monotonic() + 300
    while file.stat().st_size <= 7 and time.monotonic() < deadline:
        time.sleep(0.05)
    return file.read_bytes()


@pytest.mark.filterwarnings("ignore")  # what wandb does at import and exit is not ours
def test_offline_files_hold_the_rows_and_resuming_keeps_the_run(tmp_path: Path) -> None:
    config = quickstart("logging.wandb=chains", "logging.wandb_mode=offline")
    rows: list[dict[str, Any]] = []
    for step in range(2):
        with wandb_log(config, tmp_path, rows.append) as on_row:
            on_row(
                {"step": step, "reward_mean": 0.25 + step, "eval_avg": None, "ess": float("nan"), "stop/answer": 1.0}
            )
    assert [row["step"] for row in rows] == [0, 1]
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    name = (tmp_path / ID_FILE).read_text()
    assert len(files) == 2
    assert all(name in file.name for file in files)
    written = [when_closed(file) for file in files]
    assert b"reward_mean" in written[0]
    assert b"0.25" in written[0]
    assert b"1.25" in written[1]
    assert not any(b"eval_avg" in data for data in written)
