"""Mixtures: exact shares, each source in its own order, and random access."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl import registry
from agent_rl.config import load
from agent_rl.data.sources.base import PromptSource
from agent_rl.registry import PartKind

CHAINS, ARITHMETIC = {"type": "chains"}, {"type": "arithmetic"}


def build(*shares: dict[str, Any], seed: int = 0) -> PromptSource:
    part = PartKind("prompts").parse({"type": "mixture", "sources": list(shares)})
    made: PromptSource = registry.build("prompts", part, seed)
    return made


def two(seed: int = 0) -> PromptSource:
    return build({"weight": 3, "prompts": CHAINS}, {"weight": 1, "prompts": ARITHMETIC, "name": "sums"}, seed=seed)


def test_shares_are_exact_in_every_thousand_and_near_in_a_hundred() -> None:
    source = two()
    tags = [source.prompt(i).tags["source"] for i in range(2000)]
    assert Counter(tags[:1000]) == Counter(tags[1000:]) == {"chains": 750, "sums": 250}
    assert all(55 <= Counter(tags[i : i + 100])["chains"] <= 95 for i in range(0, 2000, 100))
    assert tags[:1000] != tags[1000:]


def test_each_source_keeps_its_own_order_without_gaps() -> None:
    mixed = [two().prompt(i) for i in range(1500)]
    alone: PromptSource = registry.build("prompts", PartKind("prompts").parse(ARITHMETIC), 0)
    drawn = [p.messages for p in mixed if p.tags["source"] == "sums"]
    assert drawn == [alone.prompt(i).messages for i in range(len(drawn))]
    assert [p.index for p in mixed] == list(range(1500))


@given(st.integers(0, 10), st.lists(st.integers(0, 50_000), min_size=2, max_size=6))
@settings(deadline=None, max_examples=20)
def test_access_in_any_order_gives_the_same_prompts(seed: int, indices: list[int]) -> None:
    source, other = two(seed), two(seed)
    assert [source.prompt(i) for i in indices] == [other.prompt(i) for i in reversed(indices)][::-1]


def test_a_finite_source_wraps_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "p{i}", "answer": {i}}}\n' for i in range(7)))
    source = build({"prompts": {"type": "jsonl", "path": str(path), "shuffle": True}}, {"prompts": CHAINS})
    drawn = [p.answer for p in map(source.prompt, range(400)) if p.tags["source"] == "jsonl"][:70]
    assert all(sorted(drawn[i : i + 7]) == [str(n) for n in range(7)] for i in range(0, 70, 7))


def test_bad_weights() -> None:
    with pytest.raises(ValueError, match="the weight of source 'arithmetic' is less than a thousandth"):
        build({"weight": 5000, "prompts": CHAINS}, {"weight": 1, "prompts": ARITHMETIC})
    with pytest.raises(ValueError, match="weight"):
        build({"weight": 0, "prompts": CHAINS})


def test_a_mixture_in_a_run_config(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "prompts: {type: mixture, sources: [{prompts: chains}, {prompts: {type: arithmetic}, weight: 2}]}\n"
    )
    assert [share.prompts.type for share in load(path).prompts.sources] == ["chains", "arithmetic"]
    path.write_text("prompts: {type: mixture, sources: [{prompts: chanes}]}\n")
    with pytest.raises(ValueError, match="did you mean 'chains'"):
        load(path)
