"""The load-balancing loss: the formula, over the whole step whatever the packing, and what it does to the router."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from agent_rl.objective.config import ObjectiveConfig
from agent_rl.records import Trajectory
from agent_rl.settings import check
from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.trainer.load_balancing import LoadBalancing
from agent_rl.trainer.model import load_model
from agent_rl.trainer.packing import pack
from agent_rl.trainer.token_logprobs import token_logprobs
from tests.mixtures import EXPERTS, save_mixture
from tests.trajectories import random_trajectory

NUMBER, LAYERS, K = EXPERTS


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_mixture(tmp_path_factory.mktemp("mixture"))


def trajectories(routed: bool) -> list[Trajectory]:
    experts = EXPERTS if routed else None
    return [random_trajectory(np.random.default_rng(i), i, experts=experts) for i in range(6)]


def by_hand(model: object, routed: bool) -> Tensor:
    """The formula on one batch of everything, expert by expert."""
    batch = pack(trajectories(routed), [0.0] * 6)
    token_logprobs(model, batch)
    losses = []
    for layer in range(LAYERS):
        logits, chosen = model.routing_replay.logits[layer], model.routing_replay.chosen[layer]
        share = [float((chosen == e).sum()) / chosen.numel() for e in range(NUMBER)]
        mean = logits.softmax(-1).mean(0)
        losses.append(NUMBER * sum(share[e] * mean[e] for e in range(NUMBER)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("routed", [False, True])
def test_the_parts_of_micro_batches_add_up_to_the_formula(mixture: str, routed: bool) -> None:
    model = load_model(mixture)
    balance = LoadBalancing(model, 0.5, None)
    some = trajectories(routed)
    batches = [pack(part, [0.0] * len(part)) for part in (some[:1], some[1:4], [], some[4:])]
    for batch in batches:
        token_logprobs(model, batch)
        balance.count(model, batch)
    for batch in batches:
        token_logprobs(model, batch)
        part = balance.loss(model, batch)
        if part.requires_grad:
            part.backward()
    gradient = model.model.layers[0].mlp.gate.weight.grad.clone()
    model.zero_grad()
    expected = by_hand(model, routed)
    (0.5 * expected).backward()
    assert balance.metrics()["load_balancing"] == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(gradient, model.model.layers[0].mlp.gate.weight.grad, atol=1e-7, rtol=1e-4)
    assert float(gradient.abs().max()) > 1e-4


@pytest.mark.parametrize("limit", [1000, 40])
def test_training_with_it_evens_the_load(mixture: str, limit: int) -> None:
    config = TorchEngine.Config(learning_rate=1e-2, load_balancing=10.0, max_tokens_per_microbatch=limit)
    trainer = TorchEngine(config, mixture, check(ObjectiveConfig, {}))
    seen = [trainer.train(trajectories(False), step).metrics["load_balancing"] for step in range(6)]
    assert seen[-1] - 1 < (seen[0] - 1) / 2


def test_off_it_is_not_there(mixture: str, tmp_path: Path) -> None:
    trainer = TorchEngine(TorchEngine.Config(), mixture, check(ObjectiveConfig, {}))
    assert "load_balancing" not in trainer.train(trajectories(False), 0).metrics
