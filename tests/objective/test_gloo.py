"""The step's statistics over real processes: two and three ranks of a gloo group, empty ones included."""

import pytest
import torch
import torch.multiprocessing
from gloo_ranks import CLIPS, build, rank_main, step_rows, train_step
from golden_cases import cases

from agent_rl.objective.quantile import quantile

CASES = [c.values[0]["in"]["shards"] for c in cases("quantile_sharded.json")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(rank_main, (str(directory), CASES), nprocs=3)
    return {
        size: [torch.load(directory / f"{size}_{rank}.pt", weights_only=True) for rank in range(size)]
        for size in (2, 3)
    }


@pytest.mark.parametrize("size", [2, 3])
def test_the_quantile_has_the_same_bits_everywhere(found, size):
    whole = [quantile(torch.tensor([x for part in case for x in part])) for case in CASES]
    assert any(len(part) == 0 for case in CASES for part in case)
    for rank in found[size]:
        assert all(torch.equal(q, want) for q, want in zip(rank["quantiles"], whole, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("which", range(len(CLIPS)), ids=str)
def test_ranks_agree_with_one_process(found, size, which):
    ranks = [rank["steps"][which] for rank in found[size]]
    everything = [row for rank in range(size) for row in step_rows(rank, size)]
    alone = train_step(build(CLIPS[which]), everything, lambda tensor: tensor)
    for number, want in enumerate(alone):
        for own in ranks:
            assert torch.equal(own[number]["q"], want["q"])
            assert own[number]["metrics"] == pytest.approx(want["metrics"], rel=1e-5, abs=1e-7, nan_ok=True)
            assert own[number]["turns"] == ranks[0][number]["turns"]
            assert [r["n"] for r in own[number]["turns"]] == [r["n"] for r in want["turns"]]
        assert sum(own[number]["loss"] for own in ranks) == pytest.approx(want["loss"], rel=1e-5)
    assert float(alone[1]["q"].max()) > 0
