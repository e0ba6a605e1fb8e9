"""Small run configs for tests."""

from pathlib import Path
from typing import Any

import yaml

from agent_rl.config import RunConfig, apply_override
from agent_rl.settings import check

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


def quickstart(*overrides: str) -> RunConfig:
    """The quickstart's config with overrides; an episode may take as long as a crowded machine needs."""
    mapping: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    mapping["rollout"]["deadline_s"] = 600
    for override in overrides:
        apply_override(mapping, override)
    return check(RunConfig, mapping, "quickstart")
