"""The keys of the SGLang engine."""

from typing import Literal

from pydantic import Field

from agent_rl.rollout.engines.base import EngineConfig


class SGLangConfig(EngineConfig):
    """Where the server of each rollout worker comes from, and how its weights change."""

    type: Literal["sglang"] = "sglang"
    urls: list[str] = Field([])
    """Addresses of running servers, one a rollout worker (those of `eval.workers` last), each used by this run alone.
    They must see the paths of the model and of the weights. Empty: every worker launches a server of its own and
    restarts it when it dies."""
    as_served: str | None = None
    """The weight version that the servers at `urls` have and keep: nothing is loaded into them, tokens of other weights
    are an error, and workers may share a server. `agent-rl eval http://…` sets this."""
    python: str = ".sglang/bin/python"
    """The interpreter that has SGLang; it lives in an environment of its own."""
    max_sequence_tokens: int = Field(32768, ge=2)
    """The longest sequence, prompt and completion together (`--context-length`)."""
    tp_size: int = Field(1, ge=1)
    """Tensor-parallel GPUs of one replica."""
    dp_size: int = Field(1, ge=1)
    """Replicas behind one server."""
    first_gpu: int | None = Field(None, ge=0)
    """Worker i's server gets the GPUs from first_gpu + i * tp_size * dp_size on; null: those that Ray reserves for the
    worker, `ray.worker_gpus`, which is then tp_size * dp_size."""
    deterministic: bool = False
    """Draw every token with its request's seed (`--enable-deterministic-inference`); without it SGLang 0.5.23
    ignores seeds."""
    sampling_mask_max_tokens: int = Field(4096, ge=1)
    """The largest kept set that the server reports (`--sampling-mask-max-tokens`)."""
    on_update: Literal["retract", "in_place", "drain"] = "retract"
    """What happens to running requests when new weights arrive: `retract` recomputes what they have with the new
    weights, `in_place` goes on from KV entries of the old ones, `drain` lets them end first."""
    launch_args: list[str] = Field([])
    """Further arguments of `python -m sglang.launch_server`."""
    environment: dict[str, str] = Field({})
    """Further environment variables of the server."""
    start_deadline_s: float = Field(900.0, gt=0)
    """How long a server may take to start, or one at `urls` to answer."""
    update_deadline_s: float = Field(600.0, gt=0)
    """How long a weight update may take, the draining of requests included."""
    hang_deadline_s: float = Field(120.0, gt=0)
    """A server whose scheduler is silent for longer, while requests run, has hung; it is ended."""
