"""A plugin of SGLang, found through the entry point beside it: what a CPU server lacks that is no kernel."""

from typing import Any

import torch


def register() -> None:
    """Memory for recorded routing on the CPU; per-request seeds with torch_native attention.

    `--enable-deterministic-inference` is the switch that makes SGLang use a request's `sampling_seed`. It also
    swaps in batch-invariant CUDA kernels, which a CPU neither has nor needs for the draw itself.
    """
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = _keep_cpu_kernels


def _allocate(dims: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device="cpu")


def _keep_cpu_kernels(*args: Any, **kwargs: Any) -> None:
    return
