"""reasoning-gym as a source and as a reward: the same entries everywhere, its own verifier, a threshold."""

import asyncio
import inspect
import re
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from agent_rl.config import load
from agent_rl.data.reasoning_gym_tasks import REFUSED, entry
from agent_rl.data.sources.base import split_of
from agent_rl.data.sources.reasoning_gym import ReasoningGymSource
from agent_rl.records import Prompt, StopReason
from agent_rl.rewards.base import FinishedEpisode, Score
from agent_rl.rewards.reasoning_gym import ReasoningGymReward
from agent_rl.rollout.renderer import Renderer
from tests.configs import QUICKSTART

SUMS = {"name": "chain_sum", "weight": 3, "params": {"min_terms": 2, "max_terms": 2}}
GCD = {"name": "gcd"}


def source(*tasks: dict[str, Any], seed: int = 0, **keys: Any) -> ReasoningGymSource:
    config = ReasoningGymSource.Config.model_validate({"type": "reasoning_gym", "tasks": tasks, **keys})
    return ReasoningGymSource(config, seed)


def reward(**keys: Any) -> ReasoningGymReward:
    return ReasoningGymReward(ReasoningGymReward.Config(type="reasoning_gym", **keys))


def score(prompt: Prompt, text: str | None, stop: StopReason = StopReason.ANSWER, **keys: Any) -> Score:
    episode = FinishedEpisode(0, 0, 0, prompt, (), () if text is None else (text,), stop)
    return asyncio.run(reward(**keys).score(episode))


def outcome(prompt: Prompt, text: str, stop: StopReason = StopReason.ANSWER, **keys: Any) -> float:
    return score(prompt, text, stop, **keys).parts["outcome"]


def test_tasks_by_weight_and_pure() -> None:
    prompts = [source(SUMS, GCD).prompt(i) for i in range(200)]
    sums = sum(prompt.tags["task"] == "chain_sum" for prompt in prompts)
    assert 120 < sums < 180
    again = source(SUMS, GCD)
    assert [again.prompt(i) for i in (150, 3, 99)] == [prompts[i] for i in (150, 3, 99)]
    assert source(SUMS, GCD, seed=1).prompt(0) != prompts[0]


def test_the_answer_is_right_and_tags_find_the_entry_again() -> None:
    for prompt in map(source(SUMS, instruction="Box it.").prompt, range(50)):
        problem, instruction = prompt.messages[0]["content"].split("\n\n")
        terms = re.search(r": (.*) =", problem)
        assert terms is not None
        assert eval(terms.group(1)) == int(prompt.answer)
        assert instruction == "Box it."
        tags = prompt.tags
        assert entry(tags["task"], tags["params"], tags["entry"])["question"] == problem


def test_splits_share_no_problem() -> None:
    texts = {
        s: {source(GCD, split=s).prompt(i).messages[0]["content"] for i in range(150)} for s in ("train", "heldout")
    }
    assert not texts["train"] & texts["heldout"]
    assert {split_of(text) for text in texts["heldout"]} == {"heldout"}


def test_the_verifier_s_score_and_the_threshold() -> None:
    prompt = source(GCD).prompt(0)
    assert score(prompt, rf"So \boxed{{{prompt.answer}}}") == Score(1.0, {"outcome": 1, "score": 1})
    close = (
        rf"\boxed{{{prompt.answer} or so}}"  # the plain verifier gives a share for an answer that holds the right one
    )
    assert score(prompt, close).parts["score"] == len(prompt.answer) / len(f"{prompt.answer} or so")
    assert (outcome(prompt, close), outcome(prompt, close, threshold=0.1)) == (0, 1)
    assert outcome(prompt, rf"\boxed{{{prompt.answer}}}", StopReason.MAX_TOKENS) == 0
    assert outcome(prompt, prompt.answer) == 0
    assert outcome(prompt, f" {prompt.answer}\n", answer_in="text") == 1
    assert score(prompt, None, StopReason.DEADLINE).reward == 0
    assert outcome(prompt, f"Of 9 and 7.5 it is {prompt.answer}.", answer_in="number") == 1
    assert outcome(prompt, f"It is {prompt.answer}, not -3.", answer_in="number") == 0
    assert outcome(prompt, "no idea", answer_in="number") == 0


def test_an_answer_that_breaks_the_verifier_or_is_too_long_is_wrong() -> None:
    prompt = source({"name": "prime_factorization"}).prompt(0)
    assert outcome(prompt, r"\boxed{x}") == 0
    assert outcome(prompt, rf"\boxed{{{prompt.answer}}}") == 1
    assert outcome(prompt, rf"\boxed{{{prompt.answer}}}", max_answer_chars=1) == 0


def test_prompts_of_another_source_are_refused() -> None:
    with pytest.raises(ValueError, match="no tag 'task'; use it with prompts of type reasoning_gym"):
        outcome(Prompt(4, ({"role": "user", "content": "x"},), "1"), r"\boxed{1}")


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ({"name": "chain_sums"}, "no task 'chain_sums'; did you mean 'chain_sum'"),
        ({"name": "countdown"}, "verifier of 'countdown' evaluates the answer as code"),
        ({"name": "gcd", "params": {"max_valeu": 3}}, "task 'gcd' refuses its params: .*max_valeu"),
        ({"name": "gcd", "params": {"min_value": 9, "max_value": 3}}, "task 'gcd' refuses its params"),
    ],
)
def test_bad_tasks(task: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        source(task)


def test_no_task_that_is_allowed_evaluates_an_answer() -> None:
    """`eval` or SymPy's parser on what the policy wrote runs its code: an upgrade may bring new ones."""
    found = set()
    for name, (dataset, _) in DATASETS.items():
        if re.search(r"\beval\(\s*answer|parse_expr\(\s*answer|sympify\(\s*answer|exec\(", inspect.getsource(dataset)):
            found.add(name)
    assert found - REFUSED.keys() <= {"codeio"}, "codeio runs programs that ship with it, to make its entries"
    assert {name for name, reason in REFUSED.items() if "as code" in reason} <= found


def test_sums_and_products_as_chains() -> None:
    params = {"min_terms": 2, "max_terms": 3}
    tasks = ({"name": name, "as_chain": True, "params": params} for name in ("chain_sum", "products"))
    for prompt in map(source(*tasks, instruction="").prompt, range(40)):
        text = prompt.messages[0]["content"]
        assert re.fullmatch(r"s\d+( [*+-]\d+){1,2}", text)
        assert eval(text.removeprefix("s")) == int(prompt.answer)
    with pytest.raises(ValueError, match="as_chain needs sums or products"):
        source({**GCD, "as_chain": True}).prompt(0)


def test_a_list_of_entries_wraps() -> None:
    assert entry("word_ladder", {"size": 5}, 7) == entry("word_ladder", {"size": 5}, 2)


def test_the_ready_config_is_readable_to_the_tiny_model() -> None:
    config = load(QUICKSTART.parent / "reasoning_gym.yaml")
    train = ReasoningGymSource(config.prompts, config.seed)
    renderer = Renderer(QUICKSTART.parent.parent / "agent_rl" / "assets" / "tiny-qwen3")
    assert {train.prompt(i).tags["task"] for i in range(40)} == {"chain_sum", "products"}
    for prompt in map(train.prompt, range(100)):
        ids = renderer.prompt(prompt.messages)
        assert renderer.tokenizer.unk_token_id not in ids.tolist()
        assert len(ids) < config.rollout.max_episode_tokens - 2 * config.rollout.max_turn_tokens
