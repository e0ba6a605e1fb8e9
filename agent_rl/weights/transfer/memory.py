"""Folders for weights, each of one process: those that a killed one has left are removed by the next."""

import os
import shutil
import socket
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")


def make_folder(parent: Path | None = None) -> Path:
    """A folder of this process's own in `parent`.

    Without one, in /dev/shm, or in the temporary folder where the system has no such mount.
    """
    parent = parent or (_MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir()))
    prefix = f"agent-rl-weights-{socket.gethostname()}-"  # processes of other machines may share a disk
    _sweep(parent, prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))


def _sweep(parent: Path, prefix: str) -> None:
    """Remove what was left by processes of this machine that were killed: folders of those that are no more."""
    for folder in parent.glob(f"{prefix}*-*"):
        process_id = folder.name.removeprefix(prefix).partition("-")[0]
        if process_id.isdigit() and not Path(f"/proc/{process_id}").exists():
            shutil.rmtree(folder, ignore_errors=True)
