"""The report of a sweep: the comparison's rows, and means over seeds; drawn in a real browser."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent_rl.analysis.comparison import FinishedRun, per_run, summary
from agent_rl.analysis.sweep_report import write_sweep_report
from tests.chromium import EXECUTABLE, Page


def finished(arm: str, seed: int) -> FinishedRun:
    """Its evaluations are 0.2 and then 0.5 + seed / 10."""
    trained = [{"step": step, "wall_s": 1.0, "reward_mean": 0.25 * seed, "gate_rate": 0.0} for step in range(2)]
    evaluated = [{"step": step, "eval_avg": score} for step, score in ((0, 0.2), (2, 0.5 + seed / 10))]
    return FinishedRun(arm, "", arm, seed, (*trained, *evaluated))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [finished(arm, seed) for arm in ["ppo", *(f"sat_{i}" for i in range(6))] for seed in (0, 1)]
    target = tmp_path_factory.mktemp("sweep") / "report.html"
    write_sweep_report(runs, summary(per_run(runs), "ppo", 0.05), "clips", "ppo", target)
    return target


def test_the_figures_are_means_over_seeds_and_the_comparison(written: Path) -> None:
    found = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', written.read_text(), re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    charts = {chart["id"]: chart["data"] for chart in data["charts"]}
    assert set(charts) == {"ends", "eval_avg", "reward_mean", "gate_rate"}
    assert (charts["eval_avg"][0]["x"], charts["eval_avg"][0]["y"]) == ([0, 2], [0.2, 0.55])
    assert charts["reward_mean"][1]["y"] == [0.125, 0.125]
    assert charts["ends"][3]["y"] == [0.5, 0.6]
    looks = [(line["line"]["color"], line["line"]["dash"]) for line in charts["eval_avg"]]
    assert len(set(looks)) == 7  # more arms than colours
    (table,) = data["tables"]
    assert dict(zip(table["columns"], table["rows"][1], strict=True))["difference"] == 0.0


@pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium here: apt-get install chromium")
def test_it_opens_offline(written: Path, tmp_path: Path) -> None:
    with Page(tmp_path / "profile") as page:
        page.open(f"file://{written}", "document.body?.dataset.drawn")
        assert page.evaluate("document.querySelectorAll('.plot .main-svg').length > 0") is True
        assert page.evaluate("document.querySelectorAll('.chart').length") == 4
        assert page.evaluate("document.querySelector('#table-comparison').innerText").count("sat_") == 6
        assert page.errors == []
