"""Code that reaches for the host: its files, network, kernel, processes and privileges."""

import os
import re
import socket
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest

from sandbox.base import Reason

REFUSED = (
    r"\b(OSError|PermissionError|FileNotFoundError|ProcessLookupError|ConnectionRefusedError|gaierror|ValueError): "
)
FORBIDDEN = {
    "tcp": "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
    "tcp to another machine": "import socket; socket.create_connection(('192.0.2.1', 80), 1)",
    "udp": "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
    "names": "import socket; socket.getaddrinfo('example.org', 80)",
    "raw packets": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "write to the root": "open('/x', 'w')",
    "write to the library": "import os; open(os.path.dirname(os.__file__) + '/x.py', 'w')",
    "write to /dev": "open('/dev/x', 'w')",
    "kernel settings": "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "a core handler": "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
    "sysrq": "open('/proc/sysrq-trigger', 'w').write('b')",
    "devices in /sys": "open('/sys/power/state', 'w').write('mem')",
    "kernel memory": "open('/dev/mem', 'rb')",
    "kernel log": "open('/dev/kmsg')",
    "the host's init": "open('/proc/1/root/etc/shadow')",
    "the host's disk": "import os; os.mknod('/tmp/disk', 0o060600, os.makedev(254, 0)); open('/tmp/disk', 'rb')",
    "become root": "import os; os.setuid(0)",
    "set groups": "import os; os.setgroups([0])",
    "chroot": "import os; os.chroot('/tmp')",
    "a process that is not its own": "import os; os.kill(4_000, 9)",
    "a higher limit": "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (1 << 20, 1 << 20))",
    "fewer chances to be killed": "open('/proc/self/oom_score_adj', 'wb', buffering=0).write(b'-1000')",
    "priority": "import os; os.nice(-5)",
    "real-time scheduling": "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))",
    "the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
    "a host name": "import socket; socket.sethostname('x')",
}
CALLS = """42 connect 46 sendmsg 47 recvmsg 49 bind 50 listen 27 mincore 29 shmget 64 semget 68 msgget 73 flock 101
ptrace 103 syslog 105 setuid 116 setgroups 117 setresuid 126 capset 129 rt_sigqueueinfo 133 mknod 135
personality 141 setpriority 144 sched_setscheduler 149 mlock 151 mlockall 155 pivot_root 157 prctl 159
adjtimex 161 chroot 163 acct 164 settimeofday 165 mount 166 umount2 167 swapon 169 reboot 175
init_module 179 quotactl 188 setxattr 203 sched_setaffinity 222 timer_create 227 clock_settime 237 mbind
240 mq_open 246 kexec_load 248 add_key 249 request_key 250 keyctl 251 ioprio_set 253 inotify_init 259
mknodat 272 unshare 275 splice 276 tee 278 vmsplice 283 timerfd_create 294 inotify_init1 298
perf_event_open 300 fanotify_init 303 name_to_handle_at 304 open_by_handle_at 308 setns 310
process_vm_readv 311 process_vm_writev 312 kcmp 313 finit_module 317 seccomp 319 memfd_create 321 bpf
323 userfaultfd 329 pkey_mprotect 424 pidfd_send_signal 425 io_uring_setup 428 open_tree 429 move_mount
430 fsopen 434 pidfd_open 435 clone3 438 pidfd_getfd 440 process_madvise 442 mount_setattr 444
landlock_create_ruleset 447 memfd_secret 1073741863 x32_getpid"""
TRY_CALLS = """
import ctypes
libc, done = ctypes.CDLL(None, use_errno=True), []
for number, name in calls:
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38): done.append(name)
for flags in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    if libc.syscall(56, flags | 17, 0, 0, 0, 0) != -1: done.append(f'clone {flags:#x}')
done"""
CHANNEL_SECRETS = {
    "the host's addresses": "import fcntl; fcntl.ioctl(3, 0x8912, bytes(16))",
    "the host's network namespace": "import fcntl; fcntl.ioctl(3, 0x894C)",
    "a handle of the server": "import os, socket; socket.socket(fileno=os.dup(3)).getsockopt(1, 77)",
    "the server's credentials": "import os, socket; socket.socket(fileno=os.dup(3)).getsockopt(1, 17, 12)",
    "signals from the channel": "import fcntl, os; fcntl.fcntl(3, 8, os.getpid())",
    "a typed line": "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",
    "a lease": "import fcntl, os; fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "news of a shared folder": "import fcntl, os; fcntl.fcntl(os.open('/python', os.O_RDONLY), fcntl.F_NOTIFY, 1)",
    "times of a device": "import os; os.utime('/dev/null')",
    "rights of a device": "import os; os.chmod('/dev/null', 0o600)",
    "memory through /proc": "open('/proc/self/mem', 'r+b')",
    "a core file": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
}


@pytest.mark.parametrize("attack", FORBIDDEN)
def test_what_is_forbidden_raises(attacked: Any, attack: str) -> None:
    result = attacked.run(FORBIDDEN[attack])
    assert (result.reason, result.alive) == (Reason.EXCEPTION, True)
    assert re.search(REFUSED, result.error), result.error


@pytest.mark.parametrize("attack", CHANNEL_SECRETS)
def test_what_is_open_gives_nothing_away(zygote: Any, attack: str) -> None:
    result = zygote.run(CHANNEL_SECRETS[attack])
    assert re.search(REFUSED, result.error or ""), result


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_system_calls_off_the_list_fail(zygote: Any) -> None:
    words = CALLS.split()
    calls = [(int(number), name) for number, name in zip(words[::2], words[1::2], strict=True)]
    result = zygote.run(f"calls = {calls}\n{TRY_CALLS}")
    assert (result.value, result.error) == ("[]", None)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="32-bit system calls are those of x86_64")
def test_a_32_bit_system_call_ends_the_session(zygote: Any) -> None:
    getpid = bytes.fromhex("b814000000cd80c3")  # mov eax, 20; int 0x80; ret
    code = (
        "import ctypes, mmap\npage = mmap.mmap(-1, 4096, prot=7)\n"
        f"page.write({getpid!r})\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"
    )
    result = zygote.run(code)
    assert (result.reason, result.alive, result.value) == (Reason.EXIT, False, None)


@pytest.mark.parametrize("family", ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"])
def test_there_are_no_sockets_and_the_error_says_so(zygote: Any, family: str) -> None:
    for kind in ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW"):
        assert "Network is unreachable" in zygote.run(f"from socket import *; socket({family}, {kind})").error


def test_the_first_page_cannot_be_mapped(attacked: Any) -> None:
    code = "import ctypes\nmmap = ctypes.CDLL(None).mmap\nmmap.restype = ctypes.c_long\nmmap(0, 4096, 3, 0x32, -1, 0)"
    assert attacked.run(code).value == "-1"


def test_a_session_has_no_privileges(attacked: Any) -> None:
    code = "dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)"
    status = literal_eval(attacked.run(code).value)
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert set(status["Uid"].split()) == {"65534"}
    assert set(status["Gid"].split()) == {"65534"}


def test_no_session_runs_as_the_hosts_root(zygote: Any) -> None:
    session = zygote.open()
    children = zygote.server.descendants()
    uids = {Path(f"/proc/{pid}").stat().st_uid for pid in children}
    assert len(children) >= 3  # bubblewrap, the zygote, sessions
    assert 0 not in uids
    zygote.end(session)


def test_the_kernel_kills_sessions_before_the_server(zygote: Any) -> None:
    session = zygote.open()
    zygote.exec(
        session,
        "for score in ('0', '-1000'):\n  try: open('/proc/self/oom_score_adj', 'w').write(score)\n"
        "  except OSError: pass",
    )
    own, *rest = (
        int(Path(f"/proc/{pid}/oom_score_adj").read_text())
        for pid in (zygote.server.process.pid, *zygote.server.descendants()[1:])
    )
    assert min(rest) > own
    zygote.end(session)


def test_a_crash_starts_no_core_handler_of_the_host(zygote: Any) -> None:
    limits = literal_eval(zygote.run("open('/proc/self/limits').read()").value)
    soft, hard = re.search(r"^Max core file size +(\S+) +(\S+)", limits, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert soft == hard
    assert soft in ("0", "1")
    assert zygote.run("import ctypes; ctypes.string_at(0)").reason is Reason.EXIT


def test_nothing_of_the_host_is_inherited(zygote: Any) -> None:
    paths = "[p for p in map('/proc/self/fd/{}'.format, os.listdir('/proc/self/fd')) if os.path.lexists(p)]"
    links = literal_eval(zygote.run(f"import os; [(p, os.readlink(p)) for p in {paths}]").value)
    files = {path.rpartition("/")[2]: target for path, target in links}
    assert {files[fd] for fd in "012"} == {"/dev/null"}
    assert files["3"].startswith("socket:")
    assert set(files) == {"0", "1", "2", "3"}
    assert sorted(literal_eval(zygote.run("import os; os.listdir('/dev')").value)) == [
        "null",
        "random",
        "shm",
        "urandom",
        "zero",
    ]


def test_the_environment_is_the_sandboxs_own(attacked: Any) -> None:
    names = set(literal_eval(attacked.run("import os; sorted(os.environ)").value))
    assert names.isdisjoint({"SANDBOX_TOKEN", "USER", "LOGNAME", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST", "SSH_AUTH_SOCK"})


def test_a_forked_program_is_no_freer(attacked: Any) -> None:
    code = (
        "import subprocess, sys\ncode = \"print(dict(l.split(':\\t') for l in open('/proc/self/status')"
        ".read().splitlines() if ':\\t' in l))\"\n"
        "try: print(subprocess.run([sys.executable, '-S', '-c', code], capture_output=True, text=True).stdout)\n"
        "except OSError as error: print({'CapEff': '0' * 16, 'NoNewPrivs': '1', 'Seccomp': '2'})"
    )
    result = attacked.run(code)
    status = literal_eval(result.stdout.strip())
    assert (status["CapEff"], status["NoNewPrivs"], status["Seccomp"]) == ("0" * 16, "1", "2")


def test_the_hosts_own_sockets_are_out_of_reach(attacked: Any) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0agent-rl-test")
        receiver.setblocking(False)
        code = (
            "import socket\none, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
            "one.sendto(b'x', '\\0agent-rl-test')"
        )
        assert attacked.run(code).reason is Reason.EXCEPTION
        with pytest.raises(BlockingIOError):
            receiver.recv(1)


def test_what_a_session_touches_of_a_device_stays_as_it_was(attacked: Any) -> None:
    before = [os.stat(path) for path in ("/dev/null", "/dev/zero", "/dev/urandom")]
    code = (
        "import os\nfor path in ('/dev/null', '/dev/zero', '/dev/urandom'):\n"
        "  for do in (os.utime, lambda p: os.chmod(p, 0), lambda p: open(p, 'wb').write(b'x'), os.remove):\n"
        "    try: do(path)\n    except OSError: pass"
    )
    attacked.run(code)
    after = [os.stat(path) for path in ("/dev/null", "/dev/zero", "/dev/urandom")]
    assert [(s.st_mtime_ns, s.st_atime_ns, s.st_mode) for s in after] == [
        (s.st_mtime_ns, s.st_atime_ns, s.st_mode) for s in before
    ]
