"""Traces: their arithmetic is true, their mistakes are the ones asked for, and the loss is where it should be."""

import ast
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.data.sources.base import split_of
from agent_rl.warmstart.config import MixConfig
from agent_rl.warmstart.tokenizer import build_tokenizer
from agent_rl.warmstart.traces import NO_OUTPUT, Trace, draw_trace
from agent_rl.warmstart.train import collate
from sandbox.base import ExecResult
from tools.python import render

CALL = re.compile(r"<\|assistant\|><tool_call>([^<]*)</tool_call><\|end\|><\|tool\|>([^<]*)<\|end\|>")
FINAL = re.compile(r"<\|assistant\|>\\boxed\{(-?\d+)\}<\|end\|>$")


def mix(**shares: float) -> MixConfig:
    none = dict.fromkeys(MixConfig.model_fields, 0.0)
    return MixConfig.model_validate(none | shares)


def parse(trace: Trace) -> tuple[str, list[tuple[str, str]], str]:
    """(problem, calls with their outputs, answer), the parts of an episode's text."""
    problem = re.match(r"<\|user\|>([^<]*)<\|end\|>", trace.text)
    final = FINAL.search(trace.text)
    assert problem is not None
    assert final is not None
    return problem.group(1), CALL.findall(trace.text), final.group(1)


def answer_to(problem: str) -> str:
    start, *steps = problem.split(" ")
    value = start.removeprefix("s")
    for step in steps:
        value = str(eval(value + step))
    return value


def sample(n: int, **shares: float) -> list[tuple[str, list[tuple[str, str]], str]]:
    rng = random.Random(1)
    return [parse(draw_trace(rng, mix(**shares), 5)) for _ in range(n)]


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_clean_traces_solve_their_problem(seed: int, longest: int) -> None:
    problem, calls, answer = parse(draw_trace(random.Random(seed), mix(), longest))
    assert answer == answer_to(problem) == calls[-1][1]
    assert len(calls) == problem.count(" ") <= longest
    assert split_of(problem) == "train"


@given(st.integers(0, 2**32))
def test_outputs_are_what_the_programs_print(seed: int) -> None:
    trace = draw_trace(random.Random(seed), mix(wrong_program=0.5, forgotten_print=0.3, early_stop=0.3), 5)
    _, calls, answer = parse(trace)
    for code, output in calls:
        printed = re.fullmatch(r"print\((.*)\)", code)
        assert printed or code.startswith("x=")
        assert output == (str(eval(printed.group(1))) if printed else NO_OUTPUT)
    assert answer == calls[-1][1]


def test_text_is_exactly_the_expected_one() -> None:
    trace = Trace()
    trace.context("<|user|>s37 *4")
    trace.call("print(37*4)", "148")
    trace.turn(r"\boxed{148}")
    assert trace.text == (
        "<|user|>s37 *4<|end|><|assistant|><tool_call>print(37*4)</tool_call><|end|>"
        "<|tool|>148<|end|><|assistant|>\\boxed{148}<|end|>"
    )
    assert trace.written == [False, True, False, True]


def test_note_is_the_one_that_the_python_tool_writes() -> None:
    assert render(ExecResult()) == NO_OUTPUT


def test_direct_answers() -> None:
    traces = sample(400, direct=1.0, direct_right=0.1)
    assert not any(calls for _, calls, _ in traces)
    right = sum(answer == answer_to(problem) for problem, _, answer in traces)
    assert 20 < right < 60
    assert all(answer != answer_to(problem) for problem, _, answer in sample(200, direct=1.0))


def test_early_stops() -> None:
    for problem, calls, answer in sample(200, early_stop=1.0):
        k = problem.count(" ")
        assert 1 <= len(calls) < max(k, 2)
        assert answer == calls[-1][1]


def test_forgotten_prints_are_repeated_with_print() -> None:
    for problem, calls, answer in sample(50, forgotten_print=1.0):
        assert answer == answer_to(problem)
        for (bare, note), (code, _) in zip(calls[::2], calls[1::2], strict=True):
            assert note == NO_OUTPUT
            assert (bare, code) == (f"x={code[6:-1]}", f"print({code[6:-1]})")


def test_wrong_programs_differ_from_the_problem() -> None:
    for problem, calls, _ in sample(100, wrong_program=1.0):
        for (code, _), step in zip(calls, problem.split(" ")[1:], strict=True):
            expression = ast.parse(code.removeprefix("print(").removesuffix(")"), mode="eval")
            assert not ast.unparse(expression).replace(" ", "").endswith(step)


def test_long_chains_are_the_most_frequent() -> None:
    lengths = [problem.count(" ") for problem, _, _ in sample(1000)]
    assert [lengths.count(k) for k in range(1, 6)] == pytest.approx([40, 120, 200, 280, 360], abs=45)


def test_traces_follow_from_the_seed() -> None:
    shares = mix(direct=0.3, direct_right=0.1, early_stop=0.1, wrong_program=0.1, forgotten_print=0.1)
    first, again, other = (
        [draw_trace(rng, shares, 5).text for _ in range(30)] for rng in map(random.Random, (1, 1, 2))
    )
    assert first == again != other


def three_traces() -> list[Trace]:
    """Two short traces, which fit into one row, and a longer one."""
    short, other, longer = Trace(), Trace(), Trace()
    short.context("<|user|>s37 *4")
    short.turn(r"\boxed{1}")
    other.context("<|user|>s9 +1")
    other.turn(r"\boxed{2}")
    longer.context("<|user|>s37 *4")
    longer.call("print(37*4)", "148")
    longer.turn(r"\boxed{148}")
    return [short, other, longer]


@pytest.mark.parametrize("context_weight", [0.1, 0.0])
def test_loss_weights(context_weight: float) -> None:
    tokenizer = build_tokenizer(1024)
    batch = collate(tokenizer, three_traces(), context_weight)
    written = [
        "".join(tokenizer.convert_ids_to_tokens(row[weight == 1.0].tolist()))
        for row, weight in zip(batch.token_ids, batch.weights, strict=True)
    ]
    assert written == [
        r"<tool_call>print(37*4)</tool_call><|end|>\boxed{148}<|end|>",
        r"\boxed{1}<|end|>\boxed{2}<|end|>",
    ]
    first, second = "<|user|>s37 *4<|end|><|assistant|>", "<|user|>s9 +1<|end|><|assistant|>"
    context, answer = (len(tokenizer.encode(text)) for text in (first, r"\boxed{1}<|end|>"))
    other = len(tokenizer.encode(second))
    expected = [0.0, *[context_weight] * (context - 1), *[1.0] * answer]
    expected += [0.0, *[context_weight] * (other - 1), *[1.0] * answer]
    padding = batch.weights.shape[1] - len(expected)
    assert torch.equal(batch.weights[1], torch.tensor(expected + [0.0] * padding))


def test_packing_keeps_every_trace_whole() -> None:
    tokenizer = build_tokenizer(1024)
    traces = three_traces()
    batch = collate(tokenizer, traces, 0.1)
    assert tokenizer.decode(batch.token_ids[0]) == traces[2].text
    packed = tokenizer.decode(batch.token_ids[1])
    assert packed.removesuffix("<|endoftext|>" * packed.count("<|endoftext|>")) == traces[0].text + traces[1].text
    first, second = (len(tokenizer.encode(trace.text)) for trace in traces[:2])
    assert batch.position_ids[1, : first + second].tolist() == [*range(first), *range(second)]
