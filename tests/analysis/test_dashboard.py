"""The dashboard, a real server on real runs: what it lists, that it follows a run, and what it refuses."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from agent_rl.analysis.dashboard import create_app
from agent_rl.pipeline.run_directory import lock
from tests.chromium import EXECUTABLE, Page


@contextmanager
def serve(root: Path) -> Iterator[httpx.Client]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(root), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=300) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture
def root(recorded: Path, run: Path, tmp_path: Path) -> Path:
    """A runs directory with a finished run, and one in a folder of its own that has done two of its four steps."""
    root = tmp_path / "runs"
    (root / "sweep").mkdir(parents=True)
    shutil.copytree(recorded, root / "done", ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    run.rename(root / "sweep" / "half")
    cut(root / "sweep" / "half", 2)
    return root


def cut(run: Path, steps: int) -> None:
    for table in ("mismatch.parquet", "training_facts.parquet", "rollout_facts.parquet"):
        for part in sorted((run / table).glob("part-*"))[steps:]:
            part.unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:steps]))


def test_runs_are_listed_with_how_far_they_are(root: Path) -> None:
    with serve(root) as client, lock(root / "sweep" / "half"):
        rows = {row["name"]: row for row in client.get("/api/runs").json()["runs"]}
    assert rows.keys() == {"done", "sweep/half"}
    assert [(row["status"], row["step"], row["num_steps"]) for row in rows.values()] == [
        ("finished", 4, 4),
        ("running", 2, 4),
    ]
    assert 0 <= rows["done"]["reward_mean"] <= 1
    assert 0 <= rows["done"]["eval_avg"] <= 1


def points(client: httpx.Client, name: str) -> tuple[list[int], str]:
    view = client.get("/api/view", params={"run": name}).json()
    reward = next(chart for chart in view["charts"] if chart["id"] == "lag")["data"][0]
    return reward["x"], view["stamp"]


def test_a_view_follows_a_run_that_is_written_meanwhile(root: Path, recorded: Path) -> None:
    half = root / "sweep" / "half"
    with serve(root) as client:
        steps, stamp = points(client, "sweep/half")
        assert steps == [0, 1]
        again = client.get("/api/view", params={"run": "sweep/half", "stamp": stamp}).json()
        assert again == {"stamp": stamp}
        lines = (recorded / "metrics.jsonl").read_text().splitlines(keepends=True)
        with (half / "metrics.jsonl").open("a") as file:
            file.write(lines[2] + lines[3][:50])
        part = (recorded / "mismatch.parquet" / "part-000002.parquet").read_bytes()
        (half / "mismatch.parquet" / "part-000002.tmp").write_bytes(part[:100])
        (half / "mismatch.parquet" / "part-000003.parquet").write_bytes(part[:100])  # as after a crash of the disk
        steps, later = points(client, "sweep/half")
        assert steps == [0, 1, 2]
        assert later != stamp
        summary = dict(client.get("/api/view", params={"run": "sweep/half"}).json()["runs"][0]["summary"])
        assert summary["Unreadable parts"] == "1, left out"
        cut(half, 1)
        assert points(client, "sweep/half")[0] == [0]


def test_two_runs_are_compared(root: Path) -> None:
    with serve(root) as client:
        view = client.get("/api/view", params={"run": ["done", "sweep/half"]}).json()
    assert [run["name"] for run in view["runs"]] == ["done", "sweep/half"]
    reward = next(chart for chart in view["charts"] if chart["id"] == "reward")["data"]
    assert {trace["name"].split(" · ")[0] for trace in reward} == {"done", "sweep/half"}
    assert len({trace["line"]["color"] for trace in reward}) == 2
    turn = next(table for table in view["tables"] if table["id"] == "turn")
    assert turn["columns"][:2] == ["turn", "run"]


def test_episodes_are_those_of_the_run_as_it_stands(root: Path) -> None:
    with serve(root) as client:
        sample = client.get("/api/episodes", params={"run": "sweep/half"}).json()
        assert sample["num_recorded"] == 32
        assert {episode["step"] for episode in sample["episodes"]} == {0, 1}
        cut(root / "sweep" / "half", 1)
        assert client.get("/api/episodes", params={"run": "sweep/half"}).json()["num_recorded"] == 16


@pytest.mark.parametrize(
    "name", ["../done", "done/../done", "/etc", ".", "", "sweep", "done/checkpoints", "a\0b", "%2e%2e"]
)
def test_no_path_leads_out_of_the_list(root: Path, name: str) -> None:
    with serve(root) as client:
        for path in ("/api/view", "/api/episodes"):
            answer = client.get(path, params={"run": name})
            assert answer.status_code == 404
            assert answer.json()["detail"].startswith("there is no run")
        for path in (f"/assets/{name}", "/assets/..%2f..%2fcli.py", "/assets/../../cli.py", "/assets/report.html"):
            assert client.get(path.replace("\0", "%00") or "/").status_code in (404, 307)


def test_what_cannot_be_shown_is_a_sentence(root: Path) -> None:
    empty = root / "empty"
    empty.mkdir()
    shutil.copy(root / "done" / "config.yaml", empty)
    (empty / "lock").touch()
    with serve(root) as client:
        assert [row["name"] for row in client.get("/api/runs").json()["runs"]] == ["done", "empty", "sweep/half"]
        answer = client.get("/api/view", params={"run": "empty"})
        assert (answer.status_code, "has no recorded step yet" in answer.json()["detail"]) == (422, True)
        many = client.get("/api/view", params={"run": ["done"] * 7})
        assert (many.status_code, many.json()["detail"]) == (422, "choose 1 to 6 runs")
        assert client.get("/api/episodes", params={"run": "empty"}).json()["episodes"] == []
        shutil.rmtree(root / "done")
        assert client.get("/api/view", params={"run": "done"}).status_code in (404, 422)


def test_a_page_of_another_name_is_refused(root: Path) -> None:
    """A site that resolves its own name to 127.0.0.1 must not read runs through the visitor's browser."""
    with serve(root) as client:
        assert client.get("/api/runs", headers={"host": "attacker.example"}).status_code == 400
        answer = client.get("/")
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium here: apt-get install chromium")
def test_the_page_lists_shows_compares_and_follows(root: Path, recorded: Path, tmp_path: Path) -> None:
    with serve(root) as client, Page(tmp_path / "profile") as page:
        page.open(f"{client.base_url}/?run=sweep%2Fhalf", "document.body?.dataset.drawn")
        assert page.evaluate("document.querySelectorAll('#runs tr').length") == 2
        assert page.evaluate("document.querySelector('h1').textContent") == "sweep/half"
        lines = (recorded / "metrics.jsonl").read_text().splitlines(keepends=True)
        with (root / "sweep" / "half" / "metrics.jsonl").open("a") as file:
            file.write(lines[2])
        page.wait_for("document.querySelector('#summary dd').textContent === '3 of 4'")
        page.evaluate("document.querySelector('#runs input').click()")
        page.wait_for("document.querySelectorAll('#plot-lag .scatter').length === 4")
        assert page.evaluate("location.search") == "?run=sweep%2Fhalf&run=done"
        page.evaluate("document.getElementById('load').click()")
        page.wait_for("document.querySelectorAll('.list button').length > 0")
        page.evaluate("document.querySelector('[data-move=\"1\"]').click()")
        assert page.evaluate("location.hash").startswith("#episode=1")
        shutil.rmtree(root / "done")
        page.wait_for("document.getElementById('message').textContent.includes('there is no run')")
        # A page that asks while the run is half removed gets the sentence of a run without steps, and a 422.
        assert [error for error in page.errors if "404" not in error and "422" not in error] == []
        assert all(url.startswith((str(client.base_url), "data:", "blob:")) for url in page.requests)


def test_the_command_says_where_it_listens_and_what_is_taken(root: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "agent_rl.cli", "dashboard", str(root), "--port"]
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[1]
            # It listens already: a request waits until the server is up.
            assert httpx.get(f"{url}/api/runs", timeout=300).status_code == 200
            port = url.rpartition(":")[2]
            taken = subprocess.run([*command, port], capture_output=True, text=True, timeout=300)
        finally:
            process.terminate()
    assert taken.returncode == 2
    assert "Address already in use" in taken.stderr
    assert "Traceback" not in taken.stderr
