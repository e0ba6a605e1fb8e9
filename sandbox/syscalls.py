"""The few Linux system calls that Python has no name for. Standard library only: it also runs inside."""

import ctypes
import errno
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 0x1, 0x2, 0x4, 0x8, 0x20, 0x1000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 22, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL, _SECCOMP_MODE_FILTER, _CAPABILITY_VERSION_3 = 4, 2, 0x20080522
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces, CLONE_NEW* `flags`. Raises `OSError`."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Join the namespaces of the process behind the pidfd `fd`, CLONE_NEW* `flags`. Raises `OSError`."""
    _check(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount `source` at `target`; `kind` is the file system, `flags` are MS_*. Raises `OSError`."""
    fields = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*fields, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def prctl(option: int, *arguments: int) -> int:
    """Call prctl(2), with missing arguments 0; returns its result, negative on failure, and raises nothing."""
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return int(_libc.prctl(option, *padded))


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def forbid_privileges() -> None:
    """Drop the whole bounding set, and let no exec gain any: what this process holds now is all there will be."""
    _check(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    for capability in range(_LAST_CAPABILITY + 1):
        if prctl(PR_CAPBSET_DROP, capability) < 0 and ctypes.get_errno() != errno.EINVAL:
            _check(-1, "drop bounding set")  # EINVAL is past the last capability that this kernel knows
    _check(prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL), "clear ambient set")


def drop_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets."""
    header, empty = _CapHeader(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(empty)), "capset")


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def install_seccomp(program: bytes) -> None:
    """Install a classic BPF `program` (8 bytes an instruction); needs no_new_privs."""
    filters = _Filter(len(program) // 8, program)
    _check(_libc.prctl(PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filters)), "seccomp")
