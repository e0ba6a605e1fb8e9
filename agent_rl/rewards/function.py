"""A plain function as the reward: `reward: {type: function, path: my_package.my_module.my_reward}`."""

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from pydantic import Field, field_validator

from agent_rl.registry import PartConfig
from agent_rl.rewards.base import FinishedEpisode, Reward, Score


class FunctionReward(Reward):
    """Calls `my_reward(episode)`, plain or `async`, with a `FinishedEpisode`.

    It returns a `Score`, a number, or (number, parts). Without an "outcome" among the parts the number itself is the
    outcome. A plain function runs in a thread, so that a slow one does not hold up other episodes: it must be safe
    to call from several.
    """

    class Config(PartConfig):
        type: Literal["function"] = "function"
        path: str
        """Dotted path of the function."""
        timeout_s: float = Field(60.0, gt=0)
        """Seconds that a call may take. A longer call has failed; a plain function's thread then keeps running."""
        num_threads: int = Field(16, ge=1)
        """Plain functions that run at once in each rollout worker. The time that a further one waits is not its own."""

        @field_validator("path")
        @classmethod
        def _importable(cls, value: str) -> str:
            find_function(value)
            return value

    def __init__(self, config: Config) -> None:
        self.config = config
        self.function = find_function(config.path)
        self._slots = asyncio.Semaphore(config.num_threads)
        self._threads = ThreadPoolExecutor(config.num_threads)

    async def score(self, episode: FinishedEpisode) -> Score:
        """Call the function. Raises what it raises, `TimeoutError`, and `ValueError` if it returns something else."""
        if not inspect.iscoroutinefunction(self.function):
            return self._as_score(await self._in_thread(episode))
        async with asyncio.timeout(self.config.timeout_s):
            return self._as_score(await self.function(episode))

    async def _in_thread(self, episode: FinishedEpisode) -> Any:
        async with self._slots:
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    return await asyncio.get_running_loop().run_in_executor(self._threads, self.function, episode)
            except (TimeoutError, asyncio.CancelledError):
                # Its thread may go on for ever: threads that are all free take over, so that a slot always has one.
                self._threads.shutdown(wait=False)
                self._threads = ThreadPoolExecutor(self.config.num_threads)
                raise

    async def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _as_score(self, found: Any) -> Score:
        if isinstance(found, Score):
            score = found
        else:
            number, parts = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
            if not isinstance(number, (int, float)) or not isinstance(parts, dict):
                raise ValueError(f"{self.config.path} must return a number, (number, parts) or a Score, not {found!r}")
            score = Score(float(number), {"outcome": float(number), **parts})
        if not all(math.isfinite(value) for value in (score.reward, *score.parts.values())):
            raise ValueError(f"{self.config.path} returned a number that is not finite: {score!r}")
        return score


def find_function(path: str) -> Callable[[FinishedEpisode], Any]:
    """The function at a dotted path. Raises `ValueError` if there is none."""
    if not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{path!r} is no dotted path; name a function as in my_package.my_module.my_reward")
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"reward function {path!r} cannot be imported: {error}; is the folder of its module on PYTHONPATH?"
        ) from error
    if not callable(found) or isinstance(found, type):
        raise ValueError(f"{path!r} is not a function; a class is named by `type: {path}` instead")
    return found  # type: ignore[no-any-return]
