"""Keeps one SGLang server answering with the weights that it should have."""

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from agent_rl.ports import free_port
from agent_rl.rollout.engines.base import EngineError
from agent_rl.rollout.sglang.client import Client, RefusedError
from agent_rl.rollout.sglang.config import SGLangConfig
from agent_rl.rollout.sglang.loading import Loading
from agent_rl.rollout.sglang.messages import VersionLabels
from agent_rl.rollout.sglang.probe import check_server
from agent_rl.rollout.sglang.server import ServerProcess, launch_command, launch_environment
from agent_rl.rollout.sglang.weights import check_shapes
from agent_rl.weights.base import WeightFile, Weights, WeightsLostError

_MAX_LAUNCHES = 6
_POLL_S = 0.5
_HEALTH_S = 30.0


class Supervisor:
    """One server, launched here or at an address, and the version that it serves.

    `ready` makes sure that the server is launched, checked, and has the weights of the last `load`, whatever happened
    to it. `lose` reports that it was found dead or hung.
    """

    def __init__(
        self,
        config: SGLangConfig,
        model_path: Path,
        worker_index: int,
        report_routing: bool,
        versions: VersionLabels,
    ) -> None:
        self.config, self.model_path, self.versions = config, model_path.absolute(), versions
        self.process: ServerProcess | None = None
        self.policy_version = 0
        self.changing = asyncio.Lock()
        """Held while the server starts or its weights change."""
        self._weights: Weights = WeightFile(self.model_path)
        self._shapes = self._weights.shapes()
        self._worker_index, self._report_routing = worker_index, report_routing
        self._folder = Path(tempfile.gettempdir()) / f"agent-rl-sglang-{secrets.token_hex(6)}"
        self.client: Client | None = None
        """The client of a server that is known to work; None while there is none."""
        self._loading: Loading | None = None
        """Loads weights into the server of `client`."""
        self._lost: list[Client] = []
        self._starting: asyncio.Task[Client] | None = None
        self._num_launches = 0

    async def ready(self) -> Client:
        """The client of a server that serves the current weights; starts one if there is none.

        Raises `ValueError` if no server can be had, with the reason.
        """
        if self.client is not None:
            return self.client
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        # a cancelled request must not cancel the start, which others wait for
        return await asyncio.shield(self._starting)

    def lose(self, client: Client) -> None:
        """End the server behind `client`, which is dead or has hung, so that `ready` starts anew."""
        if client is self.client:
            self.client = None
            self._lost.append(client)
            if self.process:
                self.process.kill()

    async def examine(self, client: Client) -> None:
        """Examine a server after a request broke: lose it if it is dead, keep it if only the connection was."""
        dead = self.process is not None and not self.process.alive
        if dead or not await client.healthy(self.config.hang_deadline_s):
            self.lose(client)

    async def load(self, weights: Weights, policy_version: int) -> None:
        """Serve `weights` as `policy_version`.

        A server that dies meanwhile is started again, with the new weights. Raises `ValueError`, with the reason and
        the old weights in place, if they are not of this model or the server refuses them, and `WeightsLostError` if
        they cannot be had.
        """
        if self.config.as_served is not None:
            raise ValueError(
                "with rollout.engine.as_served nothing is loaded into the servers; set it to null to train"
            )
        if self._shapes:
            check_shapes(weights.shapes(), self._shapes, weights)
        await self.ready()
        async with self.changing:
            before = self._weights, self.policy_version
            self._weights, self.policy_version = weights, policy_version
            if (client := self.client) and self._loading:  # else it died: the next one starts with the new weights
                try:
                    await self._update(self._loading, weights, self.config.on_update)
                except RefusedError as refusal:
                    self._weights, self.policy_version = before
                    raise ValueError(f"{weights} was not loaded: {refusal}") from None
                except EngineError:
                    self.lose(client)
        await self.ready()

    async def close(self) -> None:
        if self._starting:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self.client:
            self.lose(self.client)
        if self.process:
            self.process.kill()
        await self._close_lost()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _close_lost(self) -> None:
        while self._lost:
            await self._lost.pop().close()

    async def _start(self) -> Client:
        """Launch or find the server, check it, and give it the current weights."""
        deadline = time.monotonic() + self.config.start_deadline_s
        self._folder.mkdir(mode=0o700, exist_ok=True)
        try:
            await self._close_lost()
            async with self.changing:
                while self.client is None:
                    self.client = await self._attempt(deadline)
                return self.client
        finally:
            self._starting = None

    async def _attempt(self, deadline: float) -> Client | None:
        """Try once to get a server; None if it fails in a way that another attempt may mend."""
        urls = self.config.urls
        client = Client(urls[self._worker_index % len(urls)] if urls else self._launch())
        loading = Loading(client, self.config, self.model_path, self._folder, self._worker_index)
        try:
            await self._answering(client, deadline)
            await check_server(client, self.config, self._report_routing)
            foreign = urls and self.config.as_served is None  # it may have any weights
            if foreign or (self._weights, self.policy_version) != (WeightFile(self.model_path), 0):
                await self._update(loading, self._weights.again(), "retract")
            self._loading = loading
            return client
        except RefusedError as refusal:
            self._lost.append(client)
            raise ValueError(f"{self._weights} was not loaded: {refusal}") from None
        except (ValueError, WeightsLostError):
            self._lost.append(client)
            raise
        except EngineError as error:
            await client.close()
            if time.monotonic() > deadline:
                raise ValueError(f"no SGLang server could be had: {error}") from None
            await asyncio.sleep(_POLL_S)
            return None

    def _launch(self) -> str:
        """Start the server's process, in the thread of the event loop; returns its address."""
        if self._num_launches == _MAX_LAUNCHES:
            raise ValueError(f"the SGLang server died {_MAX_LAUNCHES} times; its last words: {self._last_words()}")
        self._num_launches += 1
        if self.process:
            self.process.kill()
        port = free_port()
        command = launch_command(
            self.config, str(self.model_path), port, self.versions.of(0), report_routing=self._report_routing
        )
        environment = launch_environment(self.config, self._worker_index, os.environ)
        self.process = ServerProcess(command, environment, port, self._folder / "server.log")
        self.process.start()
        return self.process.url

    async def _answering(self, client: Client, deadline: float) -> None:
        """Wait until the server is healthy. Raises `ValueError` if its process ends, or the time does."""
        while True:
            try:
                await client.get("/health", _HEALTH_S)
                return
            except (EngineError, RefusedError) as error:
                if self.process and not self.process.alive:
                    raise ValueError(f"the SGLang server ended as it started: {self._last_words()}") from None
                if time.monotonic() > deadline:
                    words = f": {self._last_words()}" if self.process else ""
                    raise ValueError(
                        f"no SGLang server answers at {client.url} within {self.config.start_deadline_s:g} s "
                        f"({error}){words}"
                    ) from None
                await asyncio.sleep(_POLL_S)

    async def _update(self, loading: Loading, weights: Weights, on_update: str) -> None:
        """Load weights as the current version. Without a pause the server drains first.

        A server that may hold parts of two versions stays paused: it is ended, or given the weights again.
        """
        client, within, paused = loading.client, self.config.update_deadline_s, on_update != "drain"
        if paused:
            await client.post("/pause_generation", {"mode": on_update}, within)
        try:
            await loading.load(weights, self.versions.of(self.policy_version), flush_cache=on_update != "in_place")
        except RefusedError:
            if paused:
                await client.post("/continue_generation", {}, within)
            raise
        if paused:
            await client.post("/continue_generation", {}, within)

    def _last_words(self) -> str:
        return self.process.last_words() if self.process else ""
