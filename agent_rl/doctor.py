"""Checks what this machine can run and how to fix what it cannot, and whether engine and trainer agree."""

import asyncio
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

from agent_rl import registry
from agent_rl.config import RunConfig
from agent_rl.parity import Parity, measure
from agent_rl.records import Trajectory
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.sglang.config import SGLangConfig
from agent_rl.rollout.worker import RolloutWorker
from agent_rl.tool_server import ToolServer
from agent_rl.trainer.config import TorchConfig
from agent_rl.trainer.worker import TrainWorker
from sandbox.checks import Check, checks

MEAN_BOUND, MAX_BOUND = 1e-5, 1e-4
"""|trainer - engine| in float32 within which the ratio at lag 0 counts as 1."""
_GIB = 1 << 30
_LEAST_DISK, _LEAST_SHM, _LEAST_MEMORY = 5, 1, 4
_PACKAGES = ("torch", "transformers", "ray")


def machine_checks() -> list[Check]:
    """Python and packages, cores and memory, disk and shared memory, GPUs, the sandbox's backends and the engines."""
    return [_python(), *map(_package, _PACKAGES), *_resources(), _gpus(), *checks(), *_engines()]


def sample_parity(config: RunConfig, num_episodes: int) -> Parity:
    """Sample episodes at lag 0 with the config's engine, tools and sampler, and compare with its trainer.

    Raises `ValueError` if no token was sampled, or if an episode could not be run.
    """
    with ToolServer(config.sandbox) as server:
        trajectories = asyncio.run(_sample(config, server, num_episodes))
    return measure(trajectories, TrainWorker(_in_one_process(config)).engine.logprobs)


def _in_one_process(config: RunConfig) -> RunConfig:
    """The config with a trainer of one rank: the doctor starts no others, and log-probs do not depend on the layout."""
    if not isinstance(config.trainer, TorchConfig):
        return config
    return config.model_copy(update={"trainer": config.trainer.in_one_process()})


async def _sample(config: RunConfig, server: ToolServer, count: int) -> list[Trajectory]:
    source = registry.build("prompts", config.prompts, config.seed)
    tasks = [EpisodeTask(source.prompt(i), i, i, config.seed) for i in range(count)]
    worker = RolloutWorker(config, server.url, waves=False, token=server.token)
    try:
        result = await worker.run(tasks)
    finally:
        await worker.close()
    if result.failed:
        raise ValueError(f"{len(result.failed)} of {count} episodes could not be run: {result.failed[0].message}")
    return [episode.trajectory for episode in result.episodes]


def _python() -> Check:
    major, minor, _ = platform.python_version_tuple()
    right = (3, 11) <= (int(major), int(minor)) < (3, 13)
    fix = "" if right else "make the environment with Python 3.11 or 3.12"
    return Check("python", right, f"{platform.python_version()} on {platform.system()} {platform.machine()}", fix)


def _package(name: str) -> Check:
    required = [line for line in importlib.metadata.requires("agent-rl") or [] if line.startswith(f"{name}==")]
    wanted = required[0].partition("==")[2].partition(";")[0].strip()
    installed = importlib.metadata.version(name)
    right = installed.partition("+")[0] == wanted
    return Check(name, right, installed, "" if right else f"pip install {name}=={wanted}: this one is not tested here")


def _resources() -> list[Check]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    cores = len(os.sched_getaffinity(0))
    resources = [
        Check("cores", cores > 1, f"{cores}", "" if cores > 1 else "rollouts and training will take turns on one core"),
        Check("memory", memory >= _LEAST_MEMORY, f"{memory:.1f} GiB", _more(memory, _LEAST_MEMORY, "memory")),
    ]
    for name, path, least in (("disk here", Path.cwd(), _LEAST_DISK), ("/dev/shm", Path("/dev/shm"), _LEAST_SHM)):
        if not path.is_dir():
            fix = "weights and Ray's objects go through the temporary folder then, which is slower; mount a tmpfs there"
            resources.append(Check(name, False, "missing", fix))
            continue
        free = shutil.disk_usage(path).free / _GIB
        resources.append(Check(name, free >= least, f"{free:.1f} GiB free", _more(free, least, name)))
    return resources


def _more(available: float, least: int, name: str) -> str:
    return "" if available >= least else f"a quickstart wants {least} GiB of {name}; free some"


def _gpus() -> Check:
    import torch  # heavy

    if not torch.cuda.is_available():
        return Check("GPUs", True, "none; the quickstarts need none")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("GPUs", True, ", ".join(names))


def _engines() -> list[Check]:
    python = Path(SGLangConfig(type="sglang").python)
    name, embedded = "engine: sglang", Check("engine: embedded", True, "part of this package")
    if not python.is_file():
        fix = "make sglang-cpu, or set rollout.engine.python or rollout.engine.urls"
        return [embedded, Check(name, False, f"no interpreter at {python}", fix)]
    command = [str(python), "-c", "import importlib.metadata as m; print(m.version('sglang'))"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        return [embedded, Check(name, False, f"{python} has no SGLang", "make sglang-cpu")]
    return [embedded, Check(name, True, f"{answer.stdout.strip()} at {python}")]
