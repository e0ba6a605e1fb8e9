"""A sweep for real: finished cells are kept, a failed one is reported and the rest goes on."""

from pathlib import Path

import yaml

from tests.configs import QUICKSTART
from tests.sweep.cli import SMALL, sweep


def test_a_failed_cell_is_reported_and_a_finished_one_is_kept(tmp_path: Path) -> None:
    path, out = tmp_path / "tiny.yaml", tmp_path / "out"
    lost = {"set": {"prompts": {"type": "jsonl", "path": str(tmp_path / "absent.jsonl")}}}
    keys = {"base": str(QUICKSTART), "set": SMALL, "seeds": [0], "arms": {"lost": lost, "good": {}}}
    path.write_text(yaml.safe_dump({**keys, "baseline": "good"}))
    assert sweep(path, out, "--table") == (0, "none of the 2 runs of tiny is finished")
    code, said = sweep(path, out, "--jobs", "2")
    assert code == 1
    assert "failed: lost seed 0: exit code 2" in said
    assert "1 of 2: lost seed 0 failed 2 of 2: good seed 0 done" in said  # as they ended, where there is no terminal
    assert "1 of 2 runs finished" in said
    written = (out / "good" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    for name in ("runs.csv", "summary.csv", "sweep.png", "report.html"):
        assert (out / name).stat().st_size > 0
    code, said = sweep(path, out)
    assert (code, "1 of 2 runs finished" in said) == (1, True)
    assert (out / "good" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == written

    path.write_text(yaml.safe_dump({**keys, "set": {**SMALL, "batch.group_size": 4}}))
    code, said = sweep(path, out)
    assert (code, "was run with another batch than the sweep now says" in said) == (2, True)
