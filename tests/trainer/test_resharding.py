"""Checkpoints and weight files: what one layout wrote, every other one and transformers read."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_rl.rollout.embedded.weights import experts
from agent_rl.trainer.engines.torch import TorchEngine
from tests.mixtures import save_mixture
from tests.trainer.layout_ranks import chain_main, engine, everything, save_dense, spawn, trajectories


@pytest.fixture(scope="module", params=["dense", "mixture"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where 2x1 saved `a` after two steps, and 1x2 loaded that and saved it again as `b`."""
    directory = tmp_path_factory.mktemp("chain")
    path = directory / request.param
    save_dense(path) if request.param == "dense" else save_mixture(path)
    spawn(chain_main, directory, str(path), num_ranks=2)
    return directory


def model_path(chain: Path) -> str:
    return str(next(path for name in ("dense", "mixture") if (path := chain / name).is_dir()))


def loaded(chain: Path, name: str) -> TorchEngine:
    trainer = engine((1, 1, 1), model_path(chain), max_cosine=0.1, proximal={"every": 1})
    trainer.load(chain / name)
    return trainer


def test_weights_optimizer_and_snapshots_survive_every_change_of_layout(chain: Path) -> None:
    """2x1 to 1x2 to 1x1, all equal to the bit, and the next step is that of the ranks that never stopped."""
    alone = loaded(chain, "b")
    written: dict[str, Any] = torch.load(chain / "2x1.pt", weights_only=False)
    resharded: dict[str, Any] = torch.load(chain / "1x2.pt", weights_only=False)
    kinds = {name.split(".")[0] for name in written["saved"]}
    assert kinds == {"weights", "exp_avg", "exp_avg_sq", "step", "last", "snapshot"}
    for found in (resharded["loaded"], everything(alone)):
        assert found.keys() == written["saved"].keys()
        for name, value in written["saved"].items():
            assert torch.equal(found[name], value), name
    result = alone.train(trajectories(2, "mixture" in model_path(chain)), 2)
    assert result.metrics["loss"] == pytest.approx(written["loss"], abs=1e-5)
    assert result.metrics["gradient_cosine"] == pytest.approx(written["cosine"], abs=1e-4)


def test_transformers_loads_a_sharded_checkpoint_with_equal_logits(chain: Path, tmp_path: Path) -> None:
    """And it has the names that transformers itself writes, each expert's matrices by themselves."""
    plain = AutoModelForCausalLM.from_pretrained(chain / "a", dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours = loaded(chain, "a").model(input_ids=ids, cu_seq_lens_q=torch.tensor([0, 20], dtype=torch.int32)).logits
        torch.testing.assert_close(plain(ids).logits, ours, atol=1e-5, rtol=1e-5)
    plain.save_pretrained(tmp_path)
    theirs, written = load_file(tmp_path / "model.safetensors"), load_file(chain / "a" / "model.safetensors")
    assert written.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in written.items())


def test_engines_read_what_the_ranks_published(chain: Path) -> None:
    published = load_file(chain / "published.safetensors")
    saved = torch.load(chain / "2x1.pt", weights_only=False)["saved"]
    weights = {name.removeprefix("weights."): w for name, w in saved.items() if name.startswith("weights.")}
    by_expert = {part: w for name, whole in weights.items() for part, w in experts(name, whole).items()}
    expected = {name: w for name, w in weights.items() if not experts(name, w)} | by_expert
    assert published.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in published.items())


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """What is written are the weights at the time that the save began."""
    path = save_dense(tmp_path / "dense")
    trainer = engine((1, 1, 1), path, max_cosine=0.1)
    trainer.train(trajectories(0, False), 0)
    before = everything(trainer)
    trainer.begin_save(tmp_path / "checkpoint")
    trainer.train(trajectories(1, False), 1)
    trainer.finish_save()
    resumed = engine((1, 1, 1), path, max_cosine=0.1)
    resumed.load(tmp_path / "checkpoint")
    assert all(torch.equal(value, before[name]) for name, value in everything(resumed).items())
    assert not all(torch.equal(value, before[name]) for name, value in everything(trainer).items())


def test_a_write_that_fails_is_told_and_leaves_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = engine((1, 1, 1), save_dense(tmp_path / "dense"))
    trainer.publish(tmp_path / "w.safetensors")
    good = (tmp_path / "w.safetensors").read_bytes()
    trainer.train(trajectories(0, False), 0)

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    trainer.begin_save(tmp_path / "checkpoint")
    with pytest.raises(OSError, match="No space"):
        trainer.finish_save()
    assert not (tmp_path / "checkpoint" / "model.safetensors").exists()
    with pytest.raises(OSError, match="No space"):
        trainer.publish(tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").read_bytes() == good


def test_a_checkpoint_of_another_architecture_is_refused(chain: Path, tmp_path: Path) -> None:
    other = {"dense": save_mixture, "mixture": save_dense}[Path(model_path(chain)).name](tmp_path / "other")
    with pytest.raises(ValueError, match=r"has model_type .* but the model of this run has .* resume with the model"):
        engine((1, 1, 1), other).load(chain / "a")
