"""Layouts that cannot be: every one is refused with a sentence that says what to change."""

from pathlib import Path

import pytest

from agent_rl.trainer.layout import Layout
from agent_rl.trainer.ranks import Ranks
from tests.configs import quickstart
from tests.trainer.layout_ranks import engine, save_dense

DENSE = {
    "model_type": "qwen3",
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_size": 60,
    "intermediate_size": 126,
}
MIXTURE = DENSE | {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("layout", "model", "message"),
    [
        (Layout(tp=5), DENSE, "trainer.tp is 5, but the model's num_attention_heads is 12; choose a divisor"),
        (Layout(tp=6), DENSE, "trainer.tp is 6, but the model's num_key_value_heads is 4"),
        (Layout(tp=4), DENSE, "trainer.tp is 4, but the model's intermediate_size is 126"),
        (Layout(dp=7), DENSE, "trainer.dp is 7, but the model's hidden_size is 60"),
        (Layout(tp=2, ep=2), DENSE, "trainer.ep is 2, but the model has no experts; set trainer.ep to 1"),
        (Layout(tp=4, ep=4), MIXTURE, "trainer.ep is 4, but the model's number of experts is 6"),
        (Layout(tp=2, ep=4), MIXTURE, "trainer.ep is 4 and trainer.tp is 2; set ep to 1 or to the same as tp"),
        (Layout(dp=2), DENSE | {"model_type": "llama"}, "divide models of type qwen3, qwen3_moe, this one is a llama"),
    ],
)
def test_a_layout_must_divide_the_model(layout: Layout, model: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.check(model)


def test_layouts_that_fit_are_taken() -> None:
    for layout in (Layout(), Layout(dp=2), Layout(tp=2), Layout(dp=3, tp=2)):
        layout.check(DENSE)
    Layout(dp=2, tp=2, ep=2).check(MIXTURE)
    Layout(dp=2, tp=4).check(MIXTURE)  # no dense layer, so intermediate_size is not split
    Layout().check(DENSE | {"model_type": "llama"})


def test_a_config_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ValueError, match=r"trainer.tp is 2, but the model's num_attention_heads is 3"):
        quickstart("trainer.tp=2")
    with pytest.raises(ValueError, match="has only 2 episodes for these ranks"):
        quickstart("trainer.dp=3", "batch.num_prompts=1", "batch.group_size=2")
    assert quickstart("trainer.dp=2").trainer.layout.num_ranks == 2


def test_one_process_is_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(ValueError, match=r"the layout has 2 ranks, but this is one process .* torchrun"):
        engine((2, 1, 1), save_dense(tmp_path / "dense"))


def test_the_processes_must_be_as_many_as_the_ranks(tmp_path: Path) -> None:
    Ranks(Layout()).new_group()  # this process is a group by itself
    with pytest.raises(ValueError, match=r"the layout has 2 ranks .* but 1 processes were started"):
        engine((2, 1, 1), save_dense(tmp_path / "dense"))
