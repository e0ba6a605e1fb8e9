"""Single-step integer arithmetic with short prompts: one line of Python solves each."""

import math
import random
from collections.abc import Callable
from typing import Literal

from pydantic import Field

from agent_rl.data.sources.base import GeneratedConfig, GeneratedSource, Problem

Kind = Literal["product", "product_mod", "range_sum", "gcd", "power_mod"]


def _product(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randint(101, 999), rng.randint(101, 999)
    return f"{a}*{b}=?", a * b


def _product_mod(rng: random.Random) -> tuple[str, int]:
    a, b, m = rng.randint(11, 99), rng.randint(101, 999), rng.randint(11, 99)
    return f"{a}*{b} mod {m}=?", a * b % m


def _range_sum(rng: random.Random) -> tuple[str, int]:
    first, last = rng.randint(11, 99), rng.randint(101, 999)
    return f"sum of {first}..{last}=?", (first + last) * (last - first + 1) // 2


def _gcd(rng: random.Random) -> tuple[str, int]:
    # A factor that both share, since two random numbers mostly have gcd 1 and guessing 1 would pay.
    shared = rng.randint(12, 199)
    a, b = shared * rng.randint(11, 99), shared * rng.randint(11, 99)
    return f"gcd {a},{b}=?", math.gcd(a, b)


def _power_mod(rng: random.Random) -> tuple[str, int]:
    base, exponent, m = rng.randint(2, 9), rng.randint(11, 99), rng.randint(101, 499)
    return f"{base}^{exponent} mod {m}=?", pow(base, exponent, m)


_DRAW: dict[Kind, Callable[[random.Random], tuple[str, int]]] = {
    "product": _product,
    "product_mod": _product_mod,
    "range_sum": _range_sum,
    "gcd": _gcd,
    "power_mod": _power_mod,
}


class ArithmeticSource(GeneratedSource):
    """Draws one kind of problem uniformly, then its operands; tags `{"kind": ...}`."""

    class Config(GeneratedConfig):
        kinds: tuple[Kind, ...] = Field(default=tuple(_DRAW), min_length=1)
        """The kinds of problem to draw from, all by default."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        self.kinds = config.kinds

    def draw(self, rng: random.Random) -> Problem:
        kind = rng.choice(self.kinds)
        text, answer = _DRAW[kind](rng)
        return Problem(text, str(answer), {"kind": kind})
