"""Parts of somebody else's, named by a dotted path, which know nothing of routing."""

from agent_rl.registry import PartBase, PartConfig


class PlainEngine(PartBase):
    class Config(PartConfig):
        pass


class PlainTrainer(PartBase):
    class Config(PartConfig):
        pass
