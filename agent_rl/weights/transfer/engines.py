"""Which engines can load weights in buckets."""

from typing import Any
from urllib.parse import urlsplit

_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def check_engine(weights: str, engine: Any) -> None:
    """Raises `ValueError` if engines of this config cannot load weights in buckets. `weights`: the channel's type."""
    if getattr(engine, "on_update", None) == "drain":
        raise ValueError(
            f"weights.type {weights} loads a server's weights in parts, and one that drains would sample in between; "
            "set rollout.engine.on_update to retract or in_place, or weights.type to disk"
        )
    if getattr(engine, "dp_size", 1) > 1:
        raise ValueError(
            f"weights.type {weights} is refused by an SGLang server with rollout.engine.dp_size {engine.dp_size}; set "
            "it to 1 and raise rollout.num_workers instead"
        )


def check_same_machine(engine: Any) -> None:
    """Raises `ValueError` if a server may be on another machine than its rollout worker: they share memory."""
    others = [url for url in getattr(engine, "urls", []) if urlsplit(url).hostname not in _THIS_MACHINE]
    if others:
        raise ValueError(
            f"weights.type tensor hands over memory, but rollout.engine.urls names {others[0]}, which may be another "
            "machine; use weights.type disk or distributed"
        )
