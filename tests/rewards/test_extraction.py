r"""Which piece of a text is its answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.verifier.extraction import Rule, extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{4} and \boxed{5", None),
        (r"\boxed{4} and \boxed{5" + "\nThe answer is 6", None),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{}", ""),
        (r"The answer is 7, so \boxed{8}.", "8"),
        ("The answer is 17.", "17"),
        ("The answer is: 17", "17"),
        ("Answer: 3.5. That was easy.", "3.5"),
        ("**Answer:** 12", "12"),
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
        ("The answer is \\(x^2\\), as we saw.", "x^2"),
        ("The answer is 1. No: the answer is 2.", "2"),
        ("answer = 5 cm", "5 cm"),
        ("The answer is:\n\n17", "17"),
        ("work\n#### 42\n", "42"),
        ("The answer is 4\n#### 42", "4"),
        ("We add them.\n17", "17"),
        ("We add them.\n$x = 5$.\n\n", "$x = 5$."),
        (r"so" + "\n" + r"5 \text{ square units}", r"5 \text{ square units}"),
        ("I think that it could be 17", None),
        ("17 or so, but who knows", None),
        ("1" * 201, None),
        ("no box: boxed{3}", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_the_rules_are_a_choice() -> None:
    text = "#### 1\nThe answer is 2\n3"
    only: dict[Rule, str | None] = {"boxed": None, "answer_is": "2", "hashes": "1", "last_line": "3"}
    for rule, answer in only.items():
        assert extract_answer(text, (rule,)) == answer
    assert extract_answer(text, ("last_line", "answer_is")) == "3"


@given(st.text(alphabet="\\boxed{}$#answer is:.\n17", max_size=80))
def test_an_answer_is_a_piece_of_the_text(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or answer in text
