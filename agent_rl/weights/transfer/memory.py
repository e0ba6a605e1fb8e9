"""Folders for weights, each owned by one process. The next process removes the folders of killed ones."""

import os
import shutil
import socket
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")


def make_folder(parent: Path | None = None) -> Path:
    """Create a folder of this process in `parent`, and remove those of processes of this machine that have ended.

    `parent` is /dev/shm by default, or the temporary directory if the system has no /dev/shm.
    """
    parent = parent or (_MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir()))
    prefix = f"agent-rl-weights-{socket.gethostname()}-"  # other machines may use the same disk
    _sweep(parent, prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))


def _sweep(parent: Path, prefix: str) -> None:
    """Remove the folders whose process, of this machine, no longer exists."""
    for folder in parent.glob(f"{prefix}*-*"):
        process_id = folder.name.removeprefix(prefix).partition("-")[0]
        if process_id.isdigit() and not Path(f"/proc/{process_id}").exists():
            shutil.rmtree(folder, ignore_errors=True)
