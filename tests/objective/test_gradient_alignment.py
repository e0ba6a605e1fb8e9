"""GAC on numbers worked by hand."""

import math

import pytest
import torch

from agent_rl.objective.gradient_alignment import GradientAlignment


def gradient(*values):
    """Two parameters that share the numbers."""
    return [torch.tensor(values[:1], dtype=torch.float64), torch.tensor(values[1:], dtype=torch.float64)]


def flat(gradients):
    return torch.cat(gradients).tolist()


def test_it_measures_without_a_limit():
    measure = GradientAlignment()
    assert math.isnan(measure.apply(gradient(3.0, 0.0)))
    second = gradient(4.0, 3.0)
    assert measure.apply(second) == pytest.approx(0.8)
    assert flat(second) == [4.0, 3.0]
    assert measure.apply(gradient(-3.0, 4.0)) == pytest.approx(0.0, abs=1e-15)
    assert math.isnan(measure.apply(gradient(0.0, 0.0)))


def test_it_turns_the_gradient_to_the_limit():
    """g = (4, 3) after (2, 0): g_perp = (0, 3), and cosine 0.6 gives 0.75 * 3 along the first: (2.25, 3)."""
    limited = GradientAlignment(0.6)
    limited.apply(gradient(2.0, 0.0))
    second = gradient(4.0, 3.0)
    assert limited.apply(second) == pytest.approx(0.8)
    assert flat(second) == pytest.approx([2.25, 3.0])
    third = gradient(4.0, 3.0)
    assert limited.apply(third) == pytest.approx(1.0), "it is compared with the raw gradient, not with the turned one"
    assert flat(third) == pytest.approx([0.0, 0.0], abs=1e-7)
    below = gradient(-3.0, 4.1)
    limited.apply(below)
    assert flat(below) == [-3.0, 4.1]


@pytest.mark.parametrize("skipped", [(math.nan, 0.0), (0.0, 0.0), (math.inf, 1.0)])
def test_a_gradient_that_says_nothing_is_not_the_last_one(skipped):
    limited = GradientAlignment(0.6)
    limited.apply(gradient(2.0, 0.0))
    assert math.isnan(limited.apply(gradient(*skipped)))
    third = gradient(4.0, 3.0)
    assert limited.apply(third) == pytest.approx(0.8)
    assert flat(third) == pytest.approx([2.25, 3.0])


def test_shards_and_checkpoints():
    """Each rank holds one of the two parameters; the sums over both are the whole gradient's."""
    whole, other = GradientAlignment(0.6), GradientAlignment(0.6)
    whole.apply(gradient(2.0, 0.0))
    other.load_state_dict({"previous": whole.state_dict()["previous"][:1]})
    partner = iter([[9.0], [0.0, 9.0, 0.0], [9.0, 0.0]])
    mine = gradient(4.0, 3.0)[:1]
    cosine = other.apply(mine, lambda tensor: tensor + torch.tensor(next(partner), dtype=torch.float64))
    assert cosine == pytest.approx(0.8)
    assert mine[0].item() == pytest.approx(2.25)


def test_the_limit_is_checked():
    with pytest.raises(ValueError, match="null measures without a limit"):
        GradientAlignment(1.0)
