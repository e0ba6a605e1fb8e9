"""Runs inside a Docker container, as its pid 1: one session. Standard library only.

The container gives what the zygote's sessions make for themselves (namespaces, a read-only root, no network,
no capabilities); the limits of a process and the system calls allowed are set here, the same for both.
"""

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path

from sandbox import seccomp, syscalls
from sandbox.inside import address_space, serve, set_limits, write
from sandbox.inside_files import WORKING_DIRECTORY

SOURCES = ("__init__", "cell", "contained", "inside", "inside_files", "seccomp", "syscalls")
"""The modules of this package that an image holds."""
_MIB = 1 << 20


class Pipes:
    """Standard input and output, taken away from the code: it finds /dev/null in their place."""

    def __init__(self) -> None:
        self._reading, self._writing = (os.dup(fd) for fd in (0, 1))
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """`size` bytes, or fewer at the end; `flags` are a socket's, and always those of MSG_WAITALL here."""
        received = bytearray()
        while len(received) < size and (piece := os.read(self._reading, size - len(received))):
            received += piece
        return bytes(received)

    def sendall(self, data: bytes, /) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._writing, rest) :]


def digest() -> str:
    """Digest of the sources in `SOURCES`; equal inside and outside if the image is of this version."""
    texts = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in SOURCES]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def main() -> None:
    """Serve one session on standard input and output; argv[1] is the config as JSON."""
    config = json.loads(sys.argv[1])
    pipes = Pipes()
    try:
        for name in config["preload"]:
            importlib.import_module(name)
        os.chdir(WORKING_DIRECTORY)
        config["address_space"] = address_space() + config["memory_mb"] * _MIB
        set_limits(config)
        syscalls.install_seccomp(seccomp.program(allow_fork=True))
    except BaseException as error:
        write(pipes, {"ready": False, "error": f"{type(error).__name__}: {error}"})
        return
    write(pipes, {"ready": True})
    serve(pipes, config)
