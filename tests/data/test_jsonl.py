"""Prompts from a file: what is read, in which order, and what a bad line says."""

from pathlib import Path

import pytest

from agent_rl.data.sources.jsonl import JsonlSource


def source(path: Path, seed: int = 0, shuffle: bool = False) -> JsonlSource:
    return JsonlSource(JsonlSource.Config(type="jsonl", path=path, shuffle=shuffle), seed)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def numbered(folder: Path, n: int) -> Path:
    return write(folder, *(f'{{"prompt": "p{i}", "answer": {i}}}' for i in range(n)))


def answers(src: JsonlSource, start: int, stop: int) -> list[str]:
    return [src.prompt(i).answer for i in range(start, stop)]


def test_reads_prompts_and_messages(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "1+1=?", "answer": "2", "level": 3}',
        "",
        '{"messages": [{"role": "system", "content": "Be\u2028brief."}, '
        '{"role": "user", "content": "½+1"}], "answer": 1.5}',
    )
    src = source(path)
    first, second = src.prompt(0), src.prompt(1)
    assert len(src) == 2
    assert (first.messages, first.answer, first.tags) == (({"role": "user", "content": "1+1=?"},), "2", {"level": 3})
    assert [m["content"] for m in second.messages] == ["Be\u2028brief.", "½+1"]
    assert second.answer == "1.5"


def test_index_beyond_the_file_wraps(tmp_path: Path) -> None:
    src = source(numbered(tmp_path, 3))
    assert answers(src, 0, 7) == ["0", "1", "2", "0", "1", "2", "0"]
    assert src.prompt(6).index == 6


def test_each_epoch_is_a_new_permutation(tmp_path: Path) -> None:
    path = numbered(tmp_path, 20)
    src = source(path, seed=1, shuffle=True)
    first, second = answers(src, 0, 20), answers(src, 20, 40)
    assert sorted(first) == sorted(second) == sorted(str(i) for i in range(20))
    assert first != second
    assert first != answers(source(path, seed=2, shuffle=True), 0, 20)
    assert answers(src, 0, 20) == first, "going back gives the first epoch's order again"
    assert answers(source(path, seed=1, shuffle=True), 25, 30) == second[5:10], "starting in mid-epoch"


def test_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl does not exist; set `path`"):
        source(tmp_path / "none.jsonl")


def test_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no prompts"):
        source(write(tmp_path, ""))


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "\xe9", "answer": "1"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl is not UTF-8"):
        source(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "answer": ', "not JSON"),
        ('["x"]', "not a JSON object"),
        ('{"prompt": "x"}', "no answer"),
        ('{"prompt": "x", "answer": null}', "no answer"),
        ('{"prompt": "x", "answer": "  "}', "no answer"),
        ('{"prompt": "x", "answer": true}', "no answer"),
        ('{"answer": "1"}', "exactly one of `prompt` and `messages`"),
        ('{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "answer": "1"}', "exactly one of"),
        ('{"prompt": "", "answer": "1"}', "`prompt` must be a non-empty string"),
        ('{"prompt": 3, "answer": "1"}', "`prompt` must be a non-empty string"),
        ('{"messages": [], "answer": "1"}', "`messages` must be a non-empty list"),
        ('{"messages": [{"role": "user"}], "answer": "1"}', "`messages` must be a non-empty list"),
        ('{"messages": [{"role": "user", "content": null}], "answer": "1"}', "`messages` must be a non-empty list"),
    ],
)
def test_bad_line_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, '{"prompt": "good", "answer": "1"}', "", line)
    with pytest.raises(ValueError, match=message) as error:
        source(path)
    assert str(error.value).startswith(f"{path}, line 3: ")
