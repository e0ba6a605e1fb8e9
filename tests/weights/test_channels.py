"""What every weight channel does: a path a version, gone when it is retired, nothing left when it is closed."""

from pathlib import Path
from typing import Any

import pytest

from agent_rl import registry
from agent_rl.registry import PartKind


@pytest.mark.parametrize("kind", registry.names("weights"))
def test_a_version_is_written_retired_and_gone(kind: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"directory": str(tmp_path)} if kind == "disk" else {}
    channel = registry.build("weights", PartKind("weights").parse({"type": kind, **keys}))
    first, second = channel.path(3), channel.path(4)
    assert first.parent.is_dir()
    assert first.is_absolute()
    assert first != second
    for path in (first, second):
        path.write_bytes(b"weights")
    channel.retire(3)
    channel.retire(99)
    assert (first.exists(), second.exists()) == (False, True)
    channel.close()
    assert not first.parent.exists()


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    config = PartKind("weights").parse({"type": "disk", "directory": str(tmp_path / "absent")})
    with pytest.raises(ValueError, match="is no directory; make it first"):
        registry.build("weights", config)
