"""The kept-set head against dense logits: time, memory and results of one forward and backward pass.

Each arm runs in a process of its own, on one thread; peak memory is what its resident set grew by at most. The dense
arm takes the tokens in 8 chunks. Every arm makes the gradient of the weights, whose size is said below the table.
Usage: python -m benchmarks.kept_head [TOKENS] [HIDDEN] [VOCABULARY]; the dense arm takes minutes at the defaults.
"""

import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agent_rl.trainer.kept_head import SampledTokens, head_logprobs

MEAN_KEPT, BUDGET, NUM_CHUNKS = 11, 512 << 20, 8
Arm = Callable[[Tensor, Tensor, SampledTokens], tuple[Tensor, Tensor]]


def problem(tokens: int, hidden: int, vocabulary: int) -> tuple[Tensor, Tensor, SampledTokens]:
    """Hidden states, output weights and kept sets of geometric size, the sampled token among each."""
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden) / hidden**0.5).requires_grad_()
    sizes = torch.distributions.Geometric(1 / MEAN_KEPT).sample((tokens,)).long() + 1
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    starts = torch.randint(vocabulary, (tokens,)).repeat_interleave(sizes)
    within = torch.arange(int(sizes.sum())) - offsets[:-1].repeat_interleave(sizes)
    kept = (starts + within * 7919) % vocabulary  # distinct within a row: 7919 is prime and sets are small
    chosen = offsets[:-1] + (torch.rand(tokens) * sizes).long()
    return states, weight, SampledTokens(kept[chosen], torch.full((tokens,), 0.95), kept, offsets)


def kept_set(states: Tensor, weight: Tensor, tokens: SampledTokens) -> tuple[Tensor, Tensor]:
    found = head_logprobs(states, weight, tokens, BUDGET)
    return found.logprobs, found.entropies


def kept_set_with_mass(states: Tensor, weight: Tensor, tokens: SampledTokens) -> tuple[Tensor, Tensor]:
    found = head_logprobs(states, weight, tokens, BUDGET, off_support=True)
    return found.logprobs, found.entropies


def dense(states: Tensor, weight: Tensor, tokens: SampledTokens) -> tuple[Tensor, Tensor]:
    """Masked logits over the whole vocabulary, a chunk of rows at a time, each computed again in the backward pass."""

    def rows(h: Tensor, w: Tensor, first: int) -> tuple[Tensor, Tensor]:
        assert tokens.kept_ids is not None
        assert tokens.kept_offsets is not None
        span = slice(first, first + len(h))
        offsets = tokens.kept_offsets[first : first + len(h) + 1]
        outside = torch.ones(len(h), len(w), dtype=torch.bool)
        outside[torch.arange(len(h)).repeat_interleave(offsets.diff()), tokens.kept_ids[offsets[0] : offsets[-1]]] = (
            False
        )
        logits = (h @ w.T / tokens.temperature[span, None]).masked_fill(outside, -torch.inf)
        logprobs = logits.log_softmax(-1)
        with torch.no_grad():
            entropies = torch.special.entr(logprobs.exp()).sum(-1)
        return logprobs.gather(1, tokens.ids[span, None]).squeeze(1), entropies

    chunk = -(-len(states) // NUM_CHUNKS)
    parts = [
        checkpoint(rows, h, weight, first, use_reentrant=False)
        for first, h in zip(range(0, len(states), chunk), torch.split(states, chunk), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def resident_mb(which: str) -> float:
    """VmRSS, the resident set now, or VmHWM, its peak."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measure(arm: Arm, size: tuple[int, int, int], path: Path) -> None:
    """Run an arm once on a small problem to warm up and once on the real one; save its results and figures."""
    torch.set_num_threads(1)
    warm = problem(64, 32, 1000)
    arm(*warm)[0].sum().backward()  # type: ignore[no-untyped-call]
    states, weight, tokens = problem(*size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, started = resident_mb("VmRSS"), time.process_time()
    logprobs, entropies = arm(states, weight, tokens)
    forward = time.process_time() - started
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()  # type: ignore[no-untyped-call]
    backward = time.process_time() - started - forward
    figures = {"forward": forward, "backward": backward, "peak": resident_mb("VmHWM") - before}
    results = [logprobs.detach(), entropies.detach(), states.grad, weight.grad]
    torch.save({"figures": figures, "results": results}, path)


def main() -> None:
    size = (4096, 256, 151_936)
    given = tuple(int(argument) for argument in sys.argv[1:])
    size = (*given, *size[len(given) :])
    arms: dict[str, Arm] = {
        "dense: masked, chunked, checkpointed": dense,
        "kept set, and the mass off it": kept_set_with_mass,
        "kept set": kept_set,
    }
    context, found = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as directory:
        for name, arm in arms.items():
            path = Path(directory) / f"{len(found)}.pt"
            process = context.Process(target=measure, args=(arm, size, path))
            process.start()
            process.join()
            found[name] = torch.load(path, weights_only=True)
    base = found["dense: masked, chunked, checkpointed"]
    title = f"T={size[0]}, d={size[1]}, V={size[2]}; mean kept set {MEAN_KEPT}"
    table = Table(
        "head", "forward s", "backward s", "peak MiB", "faster", "less memory", "largest difference", title=title
    )
    for name, arm_found in found.items():
        own, dense_own = arm_found["figures"], base["figures"]
        speed = (dense_own["forward"] + dense_own["backward"]) / (own["forward"] + own["backward"])
        pairs = zip(arm_found["results"], base["results"], strict=True)
        differences = ", ".join(f"{float((a - b).abs().max()):.0e}" for a, b in pairs)
        columns = (f"{own['forward']:.2f}", f"{own['backward']:.2f}", f"{own['peak']:.0f}", f"{speed:.1f}×")
        table.add_row(name, *columns, f"{dense_own['peak'] / own['peak']:.1f}×", differences)
    console = Console(width=140)
    console.print(table)
    console.print(f"gradient of the weights: {4 * size[1] * size[2] / 2**20:.0f} MiB of each peak")
    console.print("differences: of log-probs, entropies, gradient of hidden states, gradient of weights")


if __name__ == "__main__":
    main()
