"""An SGLang server as a child process: its command line, its environment, its life."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from agent_rl.rollout.sglang.config import SGLangConfig

_HOST = "127.0.0.1"
_TAIL_LINES = 15
_RESERVED_TOKENS = 8  # SGLang keeps a few positions of its context back; no sequence of ours uses these
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def launch_command(
    config: SGLangConfig, model_path: str, port: int, weight_version: str, report_routing: bool
) -> list[str]:
    """The command line of a server on loopback that serves `model_path`, stamped `weight_version`."""
    command = [config.python, "-m", "sglang.launch_server", "--model-path", model_path, "--skip-tokenizer-init"]
    command += ["--host", _HOST, "--port", str(port), "--weight-version", weight_version]
    command += ["--context-length", str(config.max_sequence_tokens + _RESERVED_TOKENS)]
    command += ["--sampling-mask-max-tokens", str(config.sampling_mask_max_tokens)]
    command += ["--tp-size", str(config.tp_size), "--dp-size", str(config.dp_size)]
    command += ["--enable-return-routed-experts"] if report_routing else []
    command += ["--enable-deterministic-inference"] if config.deterministic else []
    return [*command, *config.launch_args]


def launch_environment(config: SGLangConfig, worker_index: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's environment variables: the worker's without its Python paths, its GPUs, then the config's own."""
    kept = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
    own = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # since SGLang keeps positions back
    if config.first_gpu is not None:
        gpus = config.tp_size * config.dp_size
        first = config.first_gpu + worker_index * gpus
        own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + gpus)))
    return kept | own | config.environment


class ServerProcess:
    """One launched server; `url` is where it will answer. Its output goes to `log`.

    Call `start` from a thread that lives as long as the server may: Linux ends it with the thread that started it.
    """

    def __init__(self, command: list[str], environment: dict[str, str], port: int, log: Path) -> None:
        self.url = f"http://{_HOST}:{port}"
        self._command, self._environment, self._log = command, environment, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. Raises `ValueError` if there is no such interpreter."""
        if shutil.which(self._command[0]) is None:
            raise ValueError(
                f"there is no interpreter {self._command[0]!r} to run SGLang with; `make sglang-cpu` makes one for the "
                "CPU, otherwise install SGLang in an environment of its own and name it in rollout.engine.python"
            )
        with self._log.open("ab") as log:
            self._process = self._spawn(log)

    def _spawn(self, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        # its children end with it: SGLang sees to that. A session of its own keeps the terminal's Ctrl-C from it
        guard = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        return subprocess.Popen(
            [*guard, *self._command], stdout=log, stderr=log, env=self._environment, start_new_session=True
        )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int:
        """Also the id of the process group that the server and its children are."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End the server and its children; one that is gone already stays so."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_words(self) -> str:
        """The end of its output."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-_TAIL_LINES:])
