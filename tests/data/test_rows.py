"""Rows of Parquet files and data sets: column mappings, duplicates, tags, and the order that a stream resumes in."""

import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import polars as pl
import pytest
import yaml

from agent_rl import registry
from agent_rl.config import load, merge, read_yaml
from agent_rl.data.rows import RowsConfig, normalise_text, parse_row
from agent_rl.data.sources.base import PromptSource
from agent_rl.registry import PartKind

CONFIGS = Path(__file__).parent.parent.parent / "configs"
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve it.\n\nWhat is 1 + 1?"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "a1"},
}
DOLCI = {"prompt": "What is 2 + 2?", "ground_truth": ["4"], "dataset": ["math"]}
AIME = {"id": 60, "problem": "Find m + n.", "solution": "long", "answer": "033", "url": "u", "year": "2024"}


def build(seed: int = 0, **keys: Any) -> PromptSource:
    made: PromptSource = registry.build("prompts", PartKind("prompts").parse(keys), seed)
    return made


def numbered(path: Path, n: int) -> str:
    pl.DataFrame({"prompt": [f"p{i}" for i in range(n)], "answer": list(range(n))}).write_parquet(path)
    return str(path)


def rows_config(**keys: Any) -> RowsConfig:
    return RowsConfig(type="rows", **keys)


def test_nested_columns_and_instruction() -> None:
    config = rows_config(
        prompt_column="prompt",
        answer_column="reward_model.ground_truth",
        tag_columns=("extra_info.index", "ability"),
        instruction="Box it.",
    )
    messages, answer, tags = parse_row(DAPO, config, "row 1")
    assert messages == ({"role": "user", "content": "Solve it.\n\nWhat is 1 + 1?\n\nBox it."},)
    assert (answer, tags) == ("2", {"extra_info.index": "a1", "ability": "MATH"})


def test_every_other_column_is_a_tag_that_json_holds() -> None:
    row = {"prompt": "x", "answer": 1, "day": datetime.date(2024, 2, 1), "nested": {"k": [1, None]}}
    _, _, tags = parse_row(row, rows_config(), "row 1")
    assert tags == {"day": "2024-02-01", "nested": {"k": [1, None]}}
    assert json.loads(json.dumps(tags)) == tags


@pytest.mark.parametrize(
    ("row", "keys", "sentence"),
    [
        (DAPO, {"prompt_column": "problem"}, "row 1: no column 'problem'; there are data_source, prompt"),
        (DAPO, {"prompt_column": "prompt"}, "row 1: no answer (no column 'answer'; there are data_source"),
        ({"prompt": "x", "answer": ["1", "2"]}, {}, "row 1: no answer; give `answer` a non-empty string or a number"),
        ({"prompt": "x", "answer": 1}, {"tag_columns": ("level",)}, "row 1: no column 'level'; there are prompt"),
        ({"prompt": "x", "messages": "y", "answer": 1}, {}, "row 1: give exactly one of `prompt` and `messages`"),
    ],
)
def test_a_bad_row_says_where_and_why(row: dict[str, Any], keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^row 1: ") as error:
        parse_row(row, rows_config(**keys), "row 1")
    assert str(error.value).startswith(sentence)


def test_bad_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pl.DataFrame({"prompt": ["a", "b", "c"], "answer": ["1", None, ""]}).write_parquet(path)
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: no answer.*; 2 rows of .* are bad"):
        build(type="parquet", path=str(path))


def test_duplicates_go_and_a_limit_counts_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pl.DataFrame({"prompt": ["What  is it?", "what is IT?", "b", "b", "c"], "answer": [1, 1, 2, 3, 4]}).write_parquet(
        path
    )
    source = build(type="parquet", path=str(path), deduplicate=True, limit=3)
    assert [source.prompt(i).messages[0]["content"] for i in range(3)] == ["What  is it?", "b", "b"]
    assert len(source) == 3  # type: ignore[arg-type]


def test_text_is_compared_without_case_width_and_white_space() -> None:
    assert normalise_text(" Ｆｉｎｄ\n ½ X ") == normalise_text("find 1⁄2 x")


def test_parquet_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        pl.DataFrame({"prompt": [f"{name}0", f"{name}1"], "answer": [1, 2]}).write_parquet(tmp_path / f"{name}.parquet")
    for path in (tmp_path, tmp_path / "*.parquet"):
        source = build(type="parquet", path=str(path))
        assert [source.prompt(i).messages[0]["content"] for i in range(5)] == ["a0", "a1", "b0", "b1", "a0"]
    with pytest.raises(ValueError, match="no Parquet file at"):
        build(type="parquet", path=str(tmp_path / "c*.parquet"))
    (tmp_path / "text.txt").write_text("no")
    with pytest.raises(ValueError, match=r"text\.txt cannot be read as Parquet"):
        build(type="parquet", path=str(tmp_path / "text.txt"))


def test_shuffled_rows_resume_anywhere(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.parquet", 20)
    first = build(3, type="parquet", path=path, shuffle=True)
    forward = [first.prompt(i) for i in range(60)]
    again = build(3, type="parquet", path=path, shuffle=True)
    assert [again.prompt(i) for i in (45, 7, 59, 0, 21)] == [forward[i] for i in (45, 7, 59, 0, 21)]
    assert sorted(int(p.answer) for p in forward[20:40]) == list(range(20))
    assert [p.answer for p in forward[:20]] != [p.answer for p in forward[20:40]]


def test_saved_and_local_data_sets(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([DOLCI, {**DOLCI, "prompt": "What is 3 + 1?"}])
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data.select([0]), "test": data.select([1])}).save_to_disk(str(tmp_path / "several"))
    (tmp_path / "files").mkdir()
    data.to_parquet(str(tmp_path / "files" / "train.parquet"))
    keys = {"type": "hf", "answer_column": "ground_truth", "prompt_column": "prompt", "tag_columns": []}
    texts = {
        (name, split): [
            p.messages[0]["content"]
            for p in map(build(**keys, path=str(tmp_path / name), split=split).prompt, range(2))
        ]
        for name, split in (("one", "train"), ("several", "test"), ("files", "train"), ("files", "train[1:]"))
    }
    both = ["What is 2 + 2?", "What is 3 + 1?"]
    assert texts[("one", "train")] == texts[("files", "train")] == both
    assert texts[("several", "test")] == texts[("files", "train[1:]")] == [both[1]] * 2
    with pytest.raises(ValueError, match="cannot be loaded as split 'dev'"):
        build(**keys, path=str(tmp_path / "files"), split="dev")


def test_a_hub_id_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match="'nobody/nothing' is no local folder, and neither the Hugging Face hub"
    ) as error:
        build(type="hf", path="nobody/nothing")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "rows", "text", "answer"),
    [
        ("dapo_math_17k", [DAPO, DAPO], "Solve it.\n\nWhat is 1 + 1?", "2"),
        ("dolci_rl_zero_math_7b", [DOLCI], "What is 2 + 2?", "4"),
        ("aime_2024", [AIME], "Find m + n.", "033"),
    ],
)
def test_ready_mappings_read_rows_of_the_published_form(
    tmp_path: Path, name: str, rows: list[dict[str, Any]], text: str, answer: str
) -> None:
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    mapping = yaml.safe_load((CONFIGS / "data" / f"{name}.yaml").read_text())
    part = mapping["prompts"] if "prompts" in mapping else mapping["eval"]["prompts"]
    source = build(**{**part, "path": str(tmp_path / "data")})
    prompt = source.prompt(0)
    assert prompt.messages[0]["content"] == f"{text}\n\nPut the final answer within \\boxed{{}}."
    assert prompt.answer == answer
    assert len(source) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("path", sorted((CONFIGS / "data").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_overlay_fits_a_run(path: Path) -> None:
    config = load(CONFIGS / "quickstart.yaml", ["num_steps=7"], overlays=[path])
    assert config.num_steps == 7
    assert {config.prompts.type, config.eval.prompts.type} & {"hf", "mixture"}


def test_an_overlay_replaces_parts_whole_and_merges_the_rest() -> None:
    base = {"prompts": {"type": "jsonl", "path": "a"}, "eval": {"every": 3, "prompts": {"type": "chains"}}}
    over = {"prompts": {"type": "hf", "path": "b"}, "eval": {"num_prompts": 2}}
    assert merge(base, over) == {
        "prompts": {"type": "hf", "path": "b"},
        "eval": {"every": 3, "prompts": {"type": "chains"}, "num_prompts": 2},
    }
    assert read_yaml(CONFIGS / "data" / "aime_2024.yaml")["eval"]["num_samples"] == 16
