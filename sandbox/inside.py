"""Runs inside bubblewrap: the zygote that forks sessions, and what a session does. Standard library only.

The zygote is pid 1 of the outer namespaces and talks to the host alone: it takes a socket, forks a
session that owns it, and gives back the session's pidfd. It never reads what a session writes. A session
is pid 1 of namespaces of its own: when it dies, so does everything it started.
"""

import contextlib
import errno
import gc
import importlib
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
from typing import Any, Protocol

from sandbox import inside_files, seccomp, syscalls
from sandbox.cell import Cell

_CHANNEL, _SPARE = 3, 200
_MIB = 1 << 20
_MAX_FRAME = 1 << 26
_KEPT_MOUNT_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC


class Connection(Protocol):
    """The part of a socket that a session needs; `sandbox.contained` makes one of two pipes."""

    def recv(self, size: int, flags: int = 0, /) -> bytes: ...

    def sendall(self, data: bytes, /) -> None: ...


def main() -> None:
    """Serve fork requests on descriptor argv[1] until the host closes it; argv[2] is the config as JSON."""
    control = socket.socket(fileno=int(sys.argv[1]))
    config = json.loads(sys.argv[2])
    # when memory runs out, the kernel must pick sessions before any other process
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    for name in config["preload"]:
        importlib.import_module(name)
    _protect_devices()
    config["filter"] = seccomp.program(config["allow_fork"])
    config["address_space"] = address_space() + config["memory_mb"] * _MIB
    syscalls.forbid_privileges()
    _warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    own_namespace = os.pidfd_open(os.getpid())
    # frozen objects are never traversed again, so that sessions keep sharing their pages
    gc.collect()
    gc.freeze()
    gc.disable()
    control.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            os._exit(0)
        _fork_session(control, fds[0], own_namespace, config)
        os.close(fds[0])


def _protect_devices() -> None:
    """Mount the host's devices read-only: sessions can still write to them, but not change their times on the host."""
    for name in set(os.listdir("/dev")) - {"shm"}:
        flags = os.statvfs(f"/dev/{name}").f_flag & _KEPT_MOUNT_FLAGS  # a remount must repeat locked flags
        flags |= syscalls.MS_RDONLY | syscalls.MS_REMOUNT | syscalls.MS_BIND
        syscalls.mount("none", f"/dev/{name}", None, flags)


def _warm_up() -> None:
    """Let the interpreter set up its compiler once, here, and not in every session."""
    streams = sys.stdout, sys.stderr
    Cell().run("print(1)\n1 + 1", 1.0, 1024)
    sys.stdout, sys.stderr = streams


def _fork_session(control: socket.socket, channel: int, own_namespace: int, config: dict[str, Any]) -> None:
    """Answer the host with the session's pidfd, "died", or the number of the error with which the kernel refused it.

    The zygote outlives a refusal: all sessions would end with it.
    """
    try:
        pidfd = os.pidfd_open(_fork(channel, own_namespace, config))
    except ProcessLookupError:
        control.send(b"died")
    except OSError as error:
        control.send(b"%d" % (error.errno or errno.EIO))
    else:
        socket.send_fds(control, [b"pid"], [pidfd])
        os.close(pidfd)


def _fork(channel: int, own_namespace: int, config: dict[str, Any]) -> int:
    try:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            _session(channel, config)
        return pid
    finally:
        syscalls.setns(own_namespace, syscalls.CLONE_NEWPID)


def address_space() -> int:
    """Bytes of address space that this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _session(channel: int, config: dict[str, Any]) -> None:
    """Isolate this process, then answer the host's requests until the host closes the channel."""
    try:
        _own_descriptors(channel)
        _isolate(config)
        connection = socket.socket(fileno=_CHANNEL)
        write(connection, {"ready": True})
        serve(connection, config)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(_CHANNEL, _frame({"ready": False, "error": f"{type(error).__name__}: {error}"}))
    finally:
        os._exit(0)


def _isolate(config: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS)
    safe = syscalls.MS_NOSUID | syscalls.MS_NODEV
    for path in ("/tmp", "/dev/shm"):
        options = f"size={config['tmp_mb']}m,nr_inodes=4096,mode=1777"
        syscalls.mount("tmpfs", path, "tmpfs", safe, options)
    # read-only: among other things, a session must not lower its own oom_score_adj below the server's
    syscalls.mount("proc", "/proc", "proc", safe | syscalls.MS_NOEXEC | syscalls.MS_RDONLY, "subset=pid")
    os.chdir("/tmp")
    os.setsid()
    set_limits(config)
    syscalls.drop_capabilities()
    syscalls.install_seccomp(config["filter"])


def _own_descriptors(channel: int) -> None:
    """Close all descriptors but /dev/null as 0, 1 and 2, and the channel as 3."""
    moved = os.dup2(channel, _SPARE, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.dup2(moved, _CHANNEL, inheritable=False)
    os.closerange(_CHANNEL + 1, 1024)


def set_limits(config: dict[str, Any]) -> None:
    """Set the limits of each process of a session; `address_space` is in bytes."""
    limits = {
        resource.RLIMIT_AS: config["address_space"],
        resource.RLIMIT_FSIZE: config["tmp_mb"] * _MIB,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    # 1 byte, not 0: with 0 the kernel still runs a core handler that the host may have, with 1 it does not (core(5))
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    core = 1 if most == resource.RLIM_INFINITY else min(1, most)
    resource.setrlimit(resource.RLIMIT_CORE, (core, core))
    # the soft limit raises in the code, the hard one kills
    resource.setrlimit(resource.RLIMIT_CPU, (config["cpu_s"], config["cpu_s"] + 1))


def serve(connection: Connection, config: dict[str, Any]) -> None:
    """Answer requests until the host closes the connection."""
    gc.enable()
    random.seed(0)  # the same code gives the same output in every session
    cell = Cell()
    while (request := _read(connection)) is not None:
        if "code" in request:
            fields = cell.run(request["code"], request["wall_s"], request["max_output_bytes"])
        else:
            fields = inside_files.answer(request)
        if os.getpid() != 1:
            os._exit(0)  # this is a child that the code forked and that came back here
        if config["allow_fork"]:
            _end_children()
        write(connection, {"id": request["id"], **fields})


def _end_children() -> None:
    """End every process that a call started, also detached ones."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def write(connection: Connection, message: dict[str, Any]) -> None:
    connection.sendall(_frame(message))


def _read(connection: Connection) -> dict[str, Any] | None:
    """The next request, or None when the host has closed the channel."""
    header = connection.recv(4, socket.MSG_WAITALL)
    if len(header) < 4:
        return None
    (length,) = struct.unpack("!I", header)
    assert length <= _MAX_FRAME
    body = connection.recv(length, socket.MSG_WAITALL)
    request: dict[str, Any] = json.loads(body)
    return request
