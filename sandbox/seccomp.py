"""The system calls a session may make, as a classic BPF program. Standard library only: it also runs inside.

An allow list: what is not on it fails with EPERM. Left out on purpose, beside everything that needs
privileges: sockets (a session has only `socketpair`), `sendmsg` (file descriptors in flight are counted
per uid, across sessions), System V and POSIX IPC, memfd, keyrings, inotify, io_uring, ptrace, namespaces,
`flock` (the files of the root are shared). Of a few calls only the arguments in `_ARGUMENTS` are allowed.
"""

import errno
import platform
import struct

# (first, last) numbers, from the kernel's unistd headers
_X86_64 = """0-15 17-26 28 32-40 45 48 51-53 59-63 74-77 79-84 86-91 95-100 102 104 107-112 115 118 120-121 124
127-128 130-132 137-138 158 186 200-202 204 213 217-219 221 228-235 247 257-258 262-271 273 280-281 285
290-293 295-296 309 316 318 322 324 326 332 334 439"""
_AARCH64 = """17 19-24 34-38 43-50 52-53 56-57 59 61-73 78-80 82-83 88 93-96 98-99 101-103 113-115 123-124 128-137 139
148 150 153-158 160 163 165-166 168-169 172-179 199 204-205 207 210 214-216 221-223 226-227 233 260 276
278 281 283 285 291 293 439"""
_NUMBERS = {"x86_64": _X86_64, "aarch64": _AARCH64}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_FORKS = {"x86_64": (57, 58), "aarch64": ()}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE3 = 435
_SENDTO = {"x86_64": 44, "aarch64": 206}
_IOCTL = {"x86_64": 16, "aarch64": 29}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_GETSOCKOPT = {"x86_64": 55, "aarch64": 209}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
# (number, position of the argument, the values allowed of it)
_ARGUMENTS = (
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: SIOCGIFCONF would list the host's addresses,
    # since the channel is a socket of the host's network namespace
    (_IOCTL, 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, the record locks, F_DUPFD_CLOEXEC, F_GETPIPE_SZ: no lease and no
    # F_NOTIFY, which tells of others' use of a shared directory
    (_FCNTL, 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)),
    # SO_TYPE, SO_ERROR, SO_SNDBUF, SO_RCVBUF, SO_ACCEPTCONN, SO_PROTOCOL, SO_DOMAIN: SO_PEERPIDFD of the channel
    # would be a handle of the server
    (_GETSOCKOPT, 2, (3, 4, 7, 8, 30, 38, 39)),
    # all but RLIMIT_CORE: a limit of 0 lets a core handler of the host run, see `inside.set_limits`
    (_PRLIMIT, 1, (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)),
)
_NEW_NAMESPACE = 0x7E020000

_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NR_OFFSET, _ARCH_OFFSET, _FIRST_ARGUMENT_OFFSET, _HALF = 0, 4, 16, 4

SUPPORTED = tuple(_NUMBERS)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _op(_RETURN, _ERRNO | number)


def _ranges(machine: str) -> list[tuple[int, int]]:
    parts = [part.partition("-") for part in _NUMBERS[machine].split()]
    return [(int(first), int(last or first)) for first, _, last in parts]


def _only(number: int, position: int, values: tuple[int, ...]) -> list[bytes]:
    """Allow a call with one of `values` in the low half of an argument; the kernel takes these as 32-bit integers."""
    body = [_op(_LOAD, _FIRST_ARGUMENT_OFFSET + 8 * position)]
    for value in values:
        body += [_op(_EQUAL, value, 0, 1), _op(_RETURN, _ALLOW)]
    body.append(_fail(errno.EPERM))
    return [_op(_EQUAL, number, 0, len(body)), *body]


def _send_to_the_peer_only(number: int) -> list[bytes]:
    """`sendto` with a null address: another one can be a socket of another session, whose network is the same."""
    low = _FIRST_ARGUMENT_OFFSET + 8 * 4
    body = [_op(_LOAD, low), _op(_EQUAL, 0, 0, 3), _op(_LOAD, low + _HALF), _op(_EQUAL, 0, 0, 1), _op(_RETURN, _ALLOW)]
    body.append(_fail(errno.EPERM))
    return [_op(_EQUAL, number, 0, len(body)), *body]


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
    for numbers, position, values in _ARGUMENTS:
        ops += _only(numbers[machine], position, values)
    ops += _send_to_the_peer_only(_SENDTO[machine])
    if allow_fork:
        for number in _FORKS[machine]:
            ops += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
        ops += [_op(_EQUAL, _CLONE[machine], 0, 3), _op(_LOAD, _FIRST_ARGUMENT_OFFSET)]
        ops += [_op(_ANY_BIT, _NEW_NAMESPACE, 1, 0), _op(_RETURN, _ALLOW)]
    return b"".join([*ops, _fail(errno.EPERM)])
