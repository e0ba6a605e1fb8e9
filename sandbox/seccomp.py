"""The system calls a session may make, as a classic BPF program. Standard library only: it also runs inside.

An allow list: what is not on it fails with EPERM. Left out on purpose, beside everything that needs
privileges: sockets (a session has only `socketpair`), `sendmsg` (file descriptors in flight are counted
per uid, across sessions), System V and POSIX IPC, memfd, keyrings, inotify, io_uring, ptrace, namespaces.
"""

import errno
import platform
import struct

# (first, last) numbers, from the kernel's unistd headers
_X86_64 = """0-26 28 32-40 44-45 48 51-55 59-63 72-77 79-84 86-91 95-100 102 104 107-112 115 118 120-121 124 127-128
130-132 137-138 158 160 186 200-202 204 213 217-219 221 228-235 247 257-258 262-271 273 280-281 285 290-293 295-296 302
309 316 318 322 324 326 332 334 439"""
_AARCH64 = """17 19-25 29 32 34-38 43-50 52-53 56-57 59 61-73 78-80 82-83 88 93-96 98-99 101-103 113-115 123-124 128-137
139 148 150 153-158 160 163-166 168-169 172-179 199 204-210 214-216 221-223 226-227 233 260-261 276 278 281 283 285 291
293 439"""
_NUMBERS = {"x86_64": _X86_64, "aarch64": _AARCH64}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_FORKS = {"x86_64": (57, 58), "aarch64": ()}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE3 = 435
_NEW_NAMESPACE = 0x7E020000

_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NR_OFFSET, _ARCH_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16

SUPPORTED = tuple(_NUMBERS)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _op(_RETURN, _ERRNO | number)


def _ranges(machine: str) -> list[tuple[int, int]]:
    parts = [part.partition("-") for part in _NUMBERS[machine].split()]
    return [(int(first), int(last or first)) for first, _, last in parts]


def program(allow_fork: bool, machine: str = platform.machine()) -> bytes:
    """The filter for this machine; without `allow_fork` a session keeps to one thread of one process."""
    ops = [
        _op(_LOAD, _ARCH_OFFSET),
        _op(_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _op(_RETURN, _KILL_PROCESS),
        _op(_LOAD, _NR_OFFSET),
        # clone3 hides its flags behind a pointer: ENOSYS makes libc fall back to clone
        *(_op(_EQUAL, _CLONE3, 0, 1), _fail(errno.ENOSYS)),
        *(_op(_EQUAL, _SOCKET[machine], 0, 1), _fail(errno.ENETUNREACH)),
    ]
    for first, last in _ranges(machine):
        ops += [_op(_AT_LEAST, first, 0, 2), _op(_ABOVE, last, 1, 0), _op(_RETURN, _ALLOW)]
    if allow_fork:
        for number in _FORKS[machine]:
            ops += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
        ops += [_op(_EQUAL, _CLONE[machine], 0, 3), _op(_LOAD, _FIRST_ARGUMENT_OFFSET)]
        ops += [_op(_ANY_BIT, _NEW_NAMESPACE, 1, 0), _op(_RETURN, _ALLOW)]
    return b"".join([*ops, _fail(errno.EPERM)])
