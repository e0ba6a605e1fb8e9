"""Makes the small model that the quickstart starts from: `agent-rl warmstart configs/warmstart.yaml`."""

from agent_rl.warmstart.config import WarmstartConfig
from agent_rl.warmstart.train import Progress, run

__all__ = ["Progress", "WarmstartConfig", "run"]
