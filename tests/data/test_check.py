"""What `agent-rl data check` finds: duplicates, overlap under boilerplate, prompts that do not fit."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.config import model_directory
from agent_rl.data.check import SAMPLE, Finding, Lengths, check_overlap, check_prompts, problem_texts, prompts_of
from agent_rl.data.sources.chains import ChainSource
from agent_rl.records import Prompt
from agent_rl.run import build_prompts, checked_prompts
from tests.configs import QUICKSTART, quickstart


def prompts(*texts: str, answers: str = "") -> list[Prompt]:
    given = answers or "1" * len(texts)
    return [
        Prompt(i, ({"role": "user", "content": text},), answer)
        for i, (text, answer) in enumerate(zip(texts, given, strict=True))
    ]


def finding(found: list[Finding], check: str) -> Finding:
    return next(f for f in found if f.check == check)


def write(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "answer": 1}) + "\n" for text in texts))
    return str(path)


def test_boilerplate_does_not_hide_a_problem() -> None:
    train = prompts(*(f"Solve this.\n\nProblem {i}\n\nBox it." for i in range(6)))
    heldout = prompts("PROBLEM  3", "Problem 9", "Box it.")
    assert problem_texts(train)[2] == "problem 2"
    found = check_overlap(train, heldout)
    assert (found.level, found.count, found.total) == ("error", 1, 3)
    assert "'PROBLEM 3'" in found.detail
    assert check_overlap(train, heldout[1:]).level == "ok"


def test_prompts_that_are_all_alike_keep_their_text() -> None:
    assert problem_texts(prompts("same", "same", "same")) == ["same"] * 3


def test_duplicates_and_contradicting_answers() -> None:
    twice = finding(check_prompts("train", prompts("a", "A ", "b"), True), "duplicates")
    assert (twice.level, twice.count, twice.total) == ("warning", 1, 3)
    torn = finding(check_prompts("train", prompts("a", "a", "b", answers="121"), True), "duplicates")
    assert "1 problems have several answers, such as 'a'" in torn.detail
    assert finding(check_prompts("train", prompts("a", "b"), True), "duplicates").level == "ok"


@pytest.mark.parametrize(("num_long", "level"), [(0, "ok"), (1, "warning"), (2, "error")])
def test_prompts_over_the_budget(num_long: int, level: str) -> None:
    texts = [f"{'x' * (9 if i < num_long else 5)}{i % 10}" for i in range(100)]
    lengths = Lengths(lambda prompt: (len(prompt.messages[0]["content"]), 0), budget=10)
    found = finding(check_prompts("train", prompts(*texts), True, lengths), "prompt over the budget")
    assert (found.level, found.count) == (level, num_long)


def test_a_source_without_an_end_is_sampled_and_says_so() -> None:
    drawn, whole = prompts_of(ChainSource(ChainSource.Config(type="chains"), 0))
    assert (len(drawn), whole) == (SAMPLE, False)
    assert "only 2000 were looked at" in finding(check_prompts("train", drawn, whole), "prompts").detail


def test_the_sources_of_a_mixture_are_walked_to_their_ends(tmp_path: Path) -> None:
    """The leak is the last problem of the smaller share, which the mixture draws at about place 50,000."""
    many, few = (write(tmp_path / name, *(f"{name} {i}" for i in range(2500))) for name in ("a", "b"))
    files = [{"prompts": {"type": "jsonl", "path": many}, "weight": 19}, {"prompts": {"type": "jsonl", "path": few}}]
    mixture = {"type": "mixture", "sources": files}
    heldout = f"eval.prompts={{type: jsonl, path: {write(tmp_path / 'c', 'B 2499', 'c')}}}"
    config = quickstart(f"prompts={json.dumps(mixture)}", heldout)
    drawn, whole = prompts_of(build_prompts(config)[0])
    assert (len(drawn), whole) == (5000, True)
    with pytest.raises(ValueError, match="1 of 2 held-out prompts are trained on as well, such as 'B 2499'"):
        checked_prompts(config)
    assert len(prompts_of(build_prompts(config)[0], limit=30)[0]) == 30


def test_the_overlap_says_how_many_of_an_endless_source_were_looked_at(tmp_path: Path) -> None:
    files = [{"prompts": {"type": "jsonl", "path": write(tmp_path / "a", "x", "y")}}, {"prompts": {"type": "chains"}}]
    heldout = f"eval.prompts={{type: jsonl, path: {write(tmp_path / 'b', 'z')}}}"
    code, output = check(f"prompts={json.dumps({'type': 'mixture', 'sources': files})}", heldout)
    assert code == 0
    looked = "no problem is in both, but only 2002 training prompts were looked at, the first 2000 of each source that"
    assert looked in output


def test_a_chat_that_the_template_refuses_is_said_before_a_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_directory("builtin:tiny-qwen3"), model)
    refusal = "{%- if messages[0].content == 'z' -%}{{ raise_exception('no z here') }}{%- endif -%}\n"
    template = model / "chat_template.jinja"
    template.write_text(refusal + template.read_text())
    paths = [write(tmp_path / name, *texts) for name, texts in {"a": "zx", "b": "yz"}.items()]
    files = [f"model.path={model}", *(f"{{type: jsonl, path: {path}}}" for path in paths)]
    with pytest.raises(ValueError, match="template refuses the messages of the first of prompts: no z here"):
        build_prompts(quickstart(files[0], f"prompts={files[1]}"))
    with pytest.raises(ValueError, match=r"template refuses the messages of the first of eval\.prompts: no z here"):
        build_prompts(quickstart(files[0], f"eval.prompts={files[1]}"))
    code, output = check(files[0], f"prompts={files[2]}")
    assert code == 2
    assert "error: the model's chat template refuses the messages of prompt 1: no z here" in output


def test_a_run_refuses_held_out_prompts_that_it_trains_on(tmp_path: Path) -> None:
    both = [f"prompts={{type: jsonl, path: {write(tmp_path / 'a', 'x', 'y')}}}"]
    both.append(f"eval.prompts={{type: jsonl, path: {write(tmp_path / 'b', 'z', 'Y')}}}")
    with pytest.raises(ValueError, match="1 of 2 held-out prompts are trained on as well, such as 'Y'"):
        checked_prompts(quickstart(*both))
    for allowed in ("eval.allow_overlap=true", "eval.every=0"):
        assert len(checked_prompts(quickstart(*both, allowed))[1]) == 2  # type: ignore[arg-type]


def check(*overrides: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["data", "check", str(QUICKSTART), *overrides])
    return result.exit_code, " ".join(result.output.split())


def test_the_command_prints_a_table_and_exits_with_2_on_an_error(tmp_path: Path) -> None:
    train = write(tmp_path / "a", "1+1=?", "2+2=?", "2+2=?")
    heldout = f"eval.prompts={{type: jsonl, path: {write(tmp_path / 'b', '3+3=?')}}}"
    code, output = check(f"prompts={{type: jsonl, path: {train}}}", heldout)
    assert code == 0
    assert "train duplicates warning 1 of 3" in output
    code, output = check(f"prompts={{type: jsonl, path: {write(tmp_path / 'c', '3+3=?', 'π')}}}", heldout)
    assert code == 2
    assert "eval also in the training prompts error 1 of 1" in output
    assert "train text the tokenizer does not know error 1 of 2" in output


def test_a_missing_answer_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "answer": 1}\n{"prompt": "y"}\n')
    code, _ = check(f"prompts={{type: jsonl, path: {path}}}")
    assert code == 2
