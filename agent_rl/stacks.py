"""Stacks of all threads of a process, on a signal: also where the process is stuck and runs no Python of ours."""

import faulthandler
import os
import signal
import socket
from pathlib import Path

DUMP_SIGNAL = signal.SIGUSR1


def dump_on_signal(path: str) -> tuple[str, int]:
    """From now on `DUMP_SIGNAL` appends this process's stacks to the file `path`. Returns host name and process id."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # left open: the handler writes to it
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
    return socket.gethostname(), os.getpid()
