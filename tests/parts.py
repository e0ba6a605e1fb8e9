"""Parts of somebody else's, named by a dotted path: some know nothing of routing, some are slow."""

import asyncio
from pathlib import Path
from typing import Any

from agent_rl.registry import PartBase, PartConfig
from agent_rl.rewards.base import FinishedEpisode, Score
from agent_rl.rewards.math import MathReward
from agent_rl.rollout.engines.base import EngineConfig
from agent_rl.trainer.base import TrainerConfig
from tools.base import ToolResult
from tools.python import PythonTool


class PlainEngine(PartBase):
    class Config(EngineConfig):
        pass


class PlainTrainer(PartBase):
    class Config(TrainerConfig):
        pass


class RefusesAll(PartBase):
    class Config(PartConfig):
        def check_run(self, run: Any) -> None:
            raise ValueError("no run suits it")


class SlowPython(PythonTool):
    """The python tool behind a slow network: weights arrive while episodes wait for it."""

    class Config(PartConfig):
        delay_s: float = 0.2

    def __init__(self, config: Any, sandbox: Any) -> None:
        super().__init__(PythonTool.Config(), sandbox)
        self.delay_s = config.delay_s

    async def call(self, code: str) -> ToolResult:
        """Run Python code and return what it prints."""
        await asyncio.sleep(self.delay_s)
        return await super().call(code)


class VagueTool(PythonTool):
    """Its parameter has no annotation, so its schema cannot say what to give."""

    class Config(PartConfig):
        pass

    name = "vague"

    async def call(self, text) -> ToolResult:  # type: ignore[no-untyped-def,override]
        """Look at a text."""
        return ToolResult(text, ok=True)


class TwoSpeedMath(MathReward):
    """Of six groups in a row the third and the fourth are scored after `delay_s`, the others at once."""

    class Config(MathReward.Config):
        type: str = "tests.parts.TwoSpeedMath"  # type: ignore[assignment]
        delay_s: float = 4.0

    @staticmethod
    def is_slow(group_id: int) -> bool:
        return group_id % 6 in (2, 3)

    async def score(self, episode: FinishedEpisode) -> Score:
        if self.is_slow(episode.group_id):
            await asyncio.sleep(self.config.delay_s)  # type: ignore[attr-defined]
        return await super().score(episode)


class GatedMath(MathReward):
    """Chains of several steps are scored once the file `gate` is there: what holds them is over when a test says so."""

    class Config(MathReward.Config):
        type: str = "tests.parts.GatedMath"  # type: ignore[assignment]
        gate: Path = Path("gate")

    async def score(self, episode: FinishedEpisode) -> Score:
        gate: Path = self.config.gate  # type: ignore[attr-defined]
        while episode.prompt.tags["k"] > 1 and not gate.exists():
            await asyncio.sleep(0.02)
        return await super().score(episode)
