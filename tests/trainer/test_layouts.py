"""Every layout of ranks trains as one process does: gradients, weights, metrics and tables of the real loss."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.mixtures import save_mixture
from tests.trainer.layout_ranks import layouts_main, save_dense, spawn, three_steps

CASES = {
    "dense": {"2x1": (2, 1, 1), "1x2": (1, 2, 1), "2x2": (2, 2, 1)},
    "mixture": {"2x1": (2, 1, 1), "1x2": (1, 2, 1), "1x2 ep": (1, 2, 2), "2x2 ep": (2, 2, 2)},
}
NAMES = [f"{model} {layout}" for model, layouts in CASES.items() for layout in layouts]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By model and layout, what three steps gave; `<model> 1x1` is one process."""
    directory = tmp_path_factory.mktemp("layouts")
    paths = {"dense": save_dense(directory / "dense"), "mixture": save_mixture(directory / "mixture")}
    cases = {f"{model} {name}": (layout, paths[model]) for model in CASES for name, layout in CASES[model].items()}
    spawn(layouts_main, directory, cases)
    results = {name: torch.load(directory / f"{name}.pt", weights_only=False) for name in cases}
    return results | {f"{model} 1x1": three_steps((1, 1, 1), paths[model]) for model in CASES}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_weights_are_those_of_one_process(found: dict[str, Any], name: str) -> None:
    alone = found[f"{name.split()[0]} 1x1"]
    for step in range(3):
        for what in ("gradients", "weights"):
            for key, value in alone[what][step].items():
                scale = float(value.abs().max())
                torch.testing.assert_close(
                    found[name][what][step][key],
                    value,
                    atol=2e-5 * scale + 1e-7,
                    rtol=1e-4,
                    msg=lambda message, key=key, step=step, what=what: f"{what} of {key} at step {step}: {message}",
                )


@pytest.mark.parametrize("name", NAMES)
def test_metrics_and_tables_are_of_all_ranks(found: dict[str, Any], name: str) -> None:
    alone = found[f"{name.split()[0]} 1x1"]
    for ours, theirs in zip(found[name]["results"], alone["results"], strict=True):
        np.testing.assert_array_equal(ours.advantages, theirs.advantages)
        for column in ("logprobs", "entropy", "ref_logprobs", "proximal_logprobs"):
            for a, b in zip(getattr(ours, column), getattr(theirs, column), strict=True):
                np.testing.assert_allclose(a, b, atol=5e-5)
        apart = {"train_s", "num_microbatches"}
        assert ours.metrics.keys() == theirs.metrics.keys()
        for key in ours.metrics.keys() - apart:
            assert ours.metrics[key] == pytest.approx(theirs.metrics[key], rel=2e-4, abs=2e-5, nan_ok=True), key
        assert len(ours.mismatch) == len(theirs.mismatch)
        for row, other in zip(ours.mismatch, theirs.mismatch, strict=True):
            assert row.keys() == other.keys()
            for key, value in row.items():
                expected = other[key]
                same = (
                    value == expected
                    if isinstance(value, str)
                    else math.isclose(value, expected, rel_tol=1e-3, abs_tol=1e-4)
                )
                assert same or value != value, (key, row, other)
