"""Checks what this machine can run: `python -m sandbox.checks`, or `checks()` from Python."""

import asyncio
import importlib.util
from typing import NamedTuple

from sandbox.base import SandboxError, Unsupported
from sandbox.docker import DockerConfig, connect, find_image
from sandbox.launch import Missing, find_bwrap
from sandbox.zygote import ZygoteConfig, ZygoteSandbox

_NAMESPACES = (
    "allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or, in a "
    "container, run it with --security-opt seccomp=unconfined,systempaths=unconfined"
)
_CGROUPS = "run the server where it may write to its cgroup: as root, or under `systemd-run --user -p Delegate=yes`"


class Check(NamedTuple):
    """One thing that a backend needs. `fix` says what to do, and is empty where `ok`."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def checks(image: str = DockerConfig().image) -> list[Check]:
    """What each backend needs, in order; takes about a second, since a first session is really made.

    Must not be called inside a running event loop.
    """
    return [*_zygote(), *_docker(image)]


def _zygote() -> list[Check]:
    try:
        found = Check("zygote: bubblewrap", True, str(find_bwrap()))
    except Missing as missing:
        detail, _, fix = str(missing).partition(": ")
        return [Check("zygote: bubblewrap", False, detail, fix)]
    try:
        limited_by = asyncio.run(_first_session())
    except SandboxError as error:
        return [found, Check("zygote: namespaces", False, str(error), _NAMESPACES)]
    isolated = Check("zygote: namespaces", True, "a first session was made and is isolated")
    if limited_by == "rlimits":
        detail = "no cgroup is writable: sessions are limited by rlimits, to one process each"
        return [found, isolated, Check("zygote: limits", True, detail, _CGROUPS)]
    return [found, isolated, Check("zygote: limits", True, f"memory, processes and CPU by {limited_by}")]


async def _first_session() -> str:
    sandbox = ZygoteSandbox(ZygoteConfig(packages=(), warm_sessions=0))
    await sandbox.start()
    try:
        return sandbox.limited_by
    finally:
        await sandbox.stop()


def _docker(image: str) -> list[Check]:
    if importlib.util.find_spec("docker") is None:
        return [Check("docker: SDK", False, "Docker's Python SDK is not installed", "pip install docker")]
    sdk = Check("docker: SDK", True, "installed")
    try:
        client = connect()
    except Unsupported as error:
        detail, _, fix = str(error).partition(": ")
        return [sdk, Check("docker: daemon", False, detail, fix or "set DOCKER_HOST to a unix:// address")]
    try:
        daemon = Check("docker: daemon", True, f"version {client.version()['Version']}")
        find_image(client, image)
    except Unsupported as error:
        detail, _, fix = str(error).partition(": ")
        return [sdk, daemon, Check("docker: image", False, detail, fix)]
    finally:
        client.close()
    return [sdk, daemon, Check("docker: image", True, image)]


def main() -> None:
    """One line a check; exit code 1 if no backend can run here."""
    found = checks()
    for check in found:
        print(f"{'ok' if check.ok else 'no':3} {check.name:20} {check.detail}{f'; {check.fix}' if check.fix else ''}")
    backends = {check.name.partition(":")[0] for check in found}
    possible = [one for one in backends if all(check.ok for check in found if check.name.startswith(one))]
    if not possible:
        raise SystemExit("no backend can run here")


if __name__ == "__main__":
    main()
