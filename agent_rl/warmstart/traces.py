"""Example episodes on chains, made by replaying the arithmetic; some contain mistakes on purpose.

A trace is spelt exactly as the chat template of the model renders the episode.
"""

import random
from dataclasses import dataclass, field

from agent_rl.data.sources.base import split_of
from agent_rl.data.sources.chains import Chain, Step, apply, draw_chain
from agent_rl.warmstart.config import MixConfig
from tools.python import NO_OUTPUT


@dataclass
class Trace:
    """An episode as pieces of text; `written` says which of them the policy writes."""

    pieces: list[str] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def context(self, text: str) -> None:
        """Add what the policy reads: a message, and the header of its own next turn."""
        self._append(f"{text}<|end|><|assistant|>", written=False)

    def turn(self, text: str) -> None:
        """Add what the policy writes in one turn, the end token included."""
        self._append(f"{text}<|end|>", written=True)

    def call(self, code: str, output: str) -> None:
        """Add a turn that calls the tool, and the tool's answer."""
        self.turn(f"<tool_call>{code}</tool_call>")
        self.context(f"<|tool|>{output}")

    def _append(self, text: str, written: bool) -> None:
        self.pieces.append(text)
        self.written.append(written)


def draw_trace(rng: random.Random, mix: MixConfig, longest: int) -> Trace:
    """A trace of a training chain of k steps, 1 <= k <= `longest`: k is the larger of two uniform draws.

    Long chains are learnt last, and the first turns of a long chain are as good an example as a short one.
    """
    k = max(rng.randint(1, longest), rng.randint(1, longest))
    chain = draw_chain(rng, k)
    while split_of(chain.text) != "train":
        chain = draw_chain(rng, k)
    trace = Trace()
    trace.context(f"<|user|>{chain.text}")
    if rng.random() < mix.direct:
        answer = chain.values[-1] if rng.random() < mix.direct_right else _guess(rng, chain)
    else:
        answer = _calculate(trace, rng, mix, chain)
    trace.turn(rf"\boxed{{{answer}}}")
    return trace


def _calculate(trace: Trace, rng: random.Random, mix: MixConfig, chain: Chain) -> int:
    """Append one call a step, mistakes included; returns the value that the last output showed."""
    steps = chain.steps
    if len(steps) > 1 and rng.random() < mix.early_stop:
        steps = steps[: rng.randint(1, len(steps) - 1)]
    value = chain.start
    for step in steps:
        step = _mistaken(rng, step) if rng.random() < mix.wrong_program else step
        program = f"{value}{step[0]}{step[1]}"
        if rng.random() < mix.forgotten_print:
            trace.call(f"x={program}", NO_OUTPUT)
        value = apply(value, step)
        trace.call(f"print({program})", str(value))
    return value


def _mistaken(rng: random.Random, step: Step) -> Step:
    """Another operator or another operand."""
    op, n = step
    if rng.random() < 0.5:
        return rng.choice([other for other in "+-*%" if other != op]), n
    return op, rng.choice([other for other in (range(2, 10) if op == "*" else range(11, 98)) if other != n])


def _guess(rng: random.Random, chain: Chain) -> int:
    """A wrong answer of about the right size."""
    right = chain.values[-1]
    guess = right
    while guess == right:
        guess = rng.randint(0, max(99, 2 * right))
    return guess
