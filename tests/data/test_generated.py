"""The generated sources: right answers, disjoint splits, and the same problems in every process."""

import itertools
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_rl import registry
from agent_rl.data.sources.arithmetic import ArithmeticSource
from agent_rl.data.sources.base import GeneratedSource, split_of
from agent_rl.data.sources.chains import Chain, ChainSource, draw_chain

SEEDS = st.integers(0, 2**32)
INDICES = st.integers(0, 10**9)


def chains(seed: int = 0, **keys: object) -> ChainSource:
    return ChainSource(ChainSource.Config.model_validate({"type": "chains", **keys}), seed)


def arithmetic(seed: int = 0, **keys: object) -> ArithmeticSource:
    return ArithmeticSource(ArithmeticSource.Config.model_validate({"type": "arithmetic", **keys}), seed)


def replay(text: str) -> list[int]:
    """The values along a chain, by Python's own arithmetic on its text."""
    start, *steps = text.split(" ")
    values = [int(start.removeprefix("s"))]
    for step in steps:
        values.append(eval(f"{values[-1]}{step}"))
    return values


def solve(text: str) -> int:
    """The answer to a single-step problem, by another way than the source's."""
    a, b, *m = (int(n) for n in re.findall("[0-9]+", text))
    if "^" in text:
        value = 1
        for _ in range(b):
            value = value * a % m[0]
        return value
    if text.startswith("sum"):
        return sum(range(a, b + 1))
    if text.startswith("gcd"):
        return max(d for d in range(1, min(a, b) + 1) if a % d == b % d == 0)
    return a * b % m[0] if m else a * b


def test_chain_worked_example() -> None:
    chain = Chain(37, (("*", 4), ("+", 19), ("%", 50)))
    assert chain.text == "s37 *4 +19 %50"
    assert chain.values == [37, 148, 167, 17]


@given(SEEDS, INDICES)
def test_chain_answers_are_right_and_every_step_matters(seed: int, index: int) -> None:
    prompt = chains(seed).prompt(index)
    text = prompt.messages[0]["content"]
    values = replay(text)
    assert prompt.messages == ({"role": "user", "content": text},)
    assert prompt.answer == str(values[-1])
    assert prompt.tags == {"k": len(values) - 1}
    assert 1 <= len(values) - 1 <= 5
    assert prompt.index == index
    assert all(before != after for before, after in itertools.pairwise(values))
    assert all(0 <= v <= 18000 for v in values)


@given(SEEDS, st.integers(1, 20))
def test_chain_operands_keep_their_rules(seed: int, k: int) -> None:
    chain = draw_chain(random.Random(seed), k)
    others = [n for op, n in chain.steps if op != "*"]
    assert len(chain.steps) == k
    assert 10 <= chain.start <= 99
    assert len(set(others)) == len(others)
    for value, (op, n) in zip(chain.values, chain.steps, strict=False):
        assert 2 <= n <= 9 if op == "*" else 11 <= n <= 97
        assert op != "-" or value >= 100
        assert op != "%" or value >= 30
        assert value <= 2000 or op in "%-"


def test_chain_lengths_are_uniform() -> None:
    lengths = [chains(3).prompt(i).tags["k"] for i in range(1000)]
    assert all(150 < lengths.count(k) < 250 for k in range(1, 6))


def test_chain_lengths_follow_the_config() -> None:
    assert {chains(min_steps=2, max_steps=3).prompt(i).tags["k"] for i in range(40)} == {2, 3}
    with pytest.raises(ValidationError, match="min_steps 4 exceeds max_steps 3"):
        chains(min_steps=4, max_steps=3)


@given(SEEDS, INDICES)
def test_arithmetic_answers_are_right(seed: int, index: int) -> None:
    prompt = arithmetic(seed).prompt(index)
    assert prompt.answer == str(solve(prompt.messages[0]["content"]))


def test_arithmetic_kinds() -> None:
    assert {arithmetic().prompt(i).tags["kind"] for i in range(100)} == {
        "product",
        "product_mod",
        "range_sum",
        "gcd",
        "power_mod",
    }
    source = arithmetic(kinds=["gcd"])
    assert all(re.fullmatch(r"gcd \d+,\d+=\?", source.prompt(i).messages[0]["content"]) for i in range(20))
    assert math.gcd(19705, 14245) == solve("gcd 19705,14245=?")


@pytest.mark.parametrize("make", [chains, arithmetic])
def test_splits_share_no_problem(make: Callable[..., GeneratedSource]) -> None:
    texts = {
        split: {make(seed, split=split).prompt(i).messages[0]["content"] for seed in range(4) for i in range(500)}
        for split in ("train", "heldout")
    }
    assert len(texts["train"]) > 1000
    assert len(texts["heldout"]) > 1000
    assert not texts["train"] & texts["heldout"]
    assert {split_of(t) for t in texts["heldout"]} == {"heldout"}


def test_a_tenth_of_all_texts_is_held_out() -> None:
    held_out = sum(split_of(f"text {i}") == "heldout" for i in range(10_000))
    assert 900 < held_out < 1100


def test_random_access_equals_reading_in_order() -> None:
    forward = [chains(7).prompt(i) for i in range(20)]
    source = chains(7)
    assert [source.prompt(i) for i in reversed(range(20))][::-1] == forward
    assert chains(8).prompt(0) != forward[0]


def test_problems_do_not_depend_on_the_process() -> None:
    code = (
        "from agent_rl.data.sources.chains import ChainSource as C;"
        "print(C(C.Config(type='chains'), 5).prompt(11).messages[0]['content'])"
    )
    seen = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": h}, capture_output=True, text=True).stdout
        for h in ("1", "2")
    }
    assert seen == {chains(5).prompt(11).messages[0]["content"] + "\n"}


@pytest.mark.parametrize("name", ["arithmetic", "chains", "hf", "jsonl", "mixture", "parquet", "reasoning_gym"])
def test_registry_finds_every_source(name: str) -> None:
    assert registry.find("prompts", name).__module__ == f"agent_rl.data.sources.{name}"
