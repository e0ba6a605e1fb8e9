"""Folders in the memory of this machine."""

import os
import shutil
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
_PREFIX = "agent-rl-weights-"


def make_folder() -> Path:
    """A folder of this process's own in /dev/shm, or in the temporary folder where the system has no such mount."""
    parent = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    _sweep(parent)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))


def _sweep(parent: Path) -> None:
    """Remove what was left by processes that were killed: folders of those that are no more."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        process_id = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process_id.isdigit() and not Path(f"/proc/{process_id}").exists():
            shutil.rmtree(folder, ignore_errors=True)
