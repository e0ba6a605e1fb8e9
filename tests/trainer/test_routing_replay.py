"""Routing replay: recorded membership, current logits, gradient into the router; and what is counted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agent_rl.config import model_directory
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.records import Trajectory
from agent_rl.routers import routers
from agent_rl.settings import check
from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.trainer.model import load_model
from agent_rl.trainer.packing import pack
from agent_rl.trainer.routing_replay import RoutingReplay, RoutingTally, replay_routing, replayed_weights
from agent_rl.trainer.token_logprobs import token_logprobs
from tests.mixtures import EXPERTS, masked_routers, save_mixture
from tests.trajectories import random_routing, random_trajectory

NUMBER, LAYERS, K = EXPERTS


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def unnormalised(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_mixture(tmp_path_factory.mktemp("unnormalised"), normalised=False)


def trajectories(count: int = 4, experts: tuple[int, int, int] | None = EXPERTS) -> list[Trajectory]:
    return [random_trajectory(np.random.default_rng(i), i, experts=experts) for i in range(count)]


def batch_of(count: int = 4) -> TokenBatch:
    return pack(trajectories(count), [0.0] * count)


def engine(path: str, objective: dict[str, Any] | None = None, **keys: Any) -> TorchEngine:
    config = TorchEngine.Config(learning_rate=1e-2, **keys)
    return TorchEngine(config, path, check(ObjectiveConfig, objective or {}))


def own_routing(model: Any, batch: TokenBatch) -> Tensor:
    """What the model chooses by itself, int16 [T, layers, k]."""
    chosen: list[Tensor] = []
    hooks = [r.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for r in routers(model).values()]
    with torch.no_grad():
        token_logprobs(model, replace(batch, routed_experts=None))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).to(torch.int16)


@pytest.mark.parametrize("kind", ["mixture", "unnormalised"])
def test_replaying_the_model_s_own_routing_changes_nothing(request: pytest.FixtureRequest, kind: str) -> None:
    """In whatever order the experts are recorded, and though some rows were not reported."""
    model, batch = load_model(request.getfixturevalue(kind)), batch_of()
    own = own_routing(model, batch)
    own[::5, 1] = -1
    plain, replayed = (
        token_logprobs(model, replace(batch, routed_experts=experts))[0] for experts in (None, own.flip(-1))
    )
    assert float(plain.detach().abs().max()) > 1
    torch.testing.assert_close(replayed, plain, atol=2e-6, rtol=0)
    assert not any(bool(x.any()) for x in model.routing_replay.differed.values())


def test_replay_is_the_formula_and_not_the_model_s_own_choice(mixture: str) -> None:
    model, batch = load_model(mixture), batch_of()
    assert batch.routed_experts is not None
    experts = torch.where(batch.routed_experts < 0, own_routing(model, batch), batch.routed_experts)
    membership = torch.zeros(len(batch), LAYERS, NUMBER, dtype=torch.bool).scatter(2, experts.long(), True)
    other = load_model(mixture)
    with torch.no_grad(), masked_routers(other, membership):
        expected = token_logprobs(other, replace(batch, routed_experts=None))[0]
    replayed = token_logprobs(model, replace(batch, routed_experts=experts))[0]
    torch.testing.assert_close(replayed, expected, atol=5e-6, rtol=0)
    own = token_logprobs(model, replace(batch, routed_experts=None))[0]
    assert float((replayed - own).detach().abs().max()) > 0.1


def double_model(path: str) -> Any:
    """In float64 throughout: the model's own norms compute in float32 whatever their input."""
    model = load_model(path).double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Qwen3MoeRMSNorm":
                norm = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon, dtype=torch.float64)
                norm.weight.data.copy_(child.weight.data)
                setattr(module, name, norm)
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("kind", ["mixture", "unnormalised"])
def test_the_gradient_reaches_the_router_and_is_that_of_finite_differences(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """In float64, on a packed batch with recorded routing that is not the model's own."""
    model, batch = double_model(request.getfixturevalue(kind)), batch_of(2)
    assert batch.routed_experts is not None
    replay_routing(model, batch.routed_experts)

    def loss() -> Tensor:
        inputs = {"input_ids": batch.token_ids[None], "position_ids": batch.position_ids[None]}
        logits = model(**inputs, cu_seq_lens_q=batch.cu_seqlens, use_cache=False).logits[0]
        active = batch.loss_mask.nonzero().squeeze(1)
        found: Tensor = logits[active - 1].log_softmax(-1).gather(1, batch.token_ids[active, None]).sum()
        return found

    loss().backward()  # type: ignore[no-untyped-call]
    assert all(bool(x.any()) for x in model.routing_replay.differed.values())
    step, checked = 1e-6, 0
    for router in routers(model).values():
        gradient = router.weight.grad
        assert gradient.dtype == torch.float64
        for place in gradient.abs().flatten().topk(8).indices.tolist():
            weight = router.weight.data.view(-1)
            before = float(weight[place])
            with torch.no_grad():
                weight[place] = before + step
                above = float(loss())
                weight[place] = before - step
                below = float(loss())
                weight[place] = before
            assert (above - below) / (2 * step) == pytest.approx(float(gradient.view(-1)[place]), rel=1e-6)
            checked += 1
    assert checked == 8 * LAYERS


def test_the_gradient_survives_checkpointing(mixture: str) -> None:
    """There the routers run again in the backward pass."""
    gradients = []
    for checkpointing in (False, True):
        model, batch = load_model(mixture), batch_of()
        if checkpointing:
            model.activation_checkpointing_enable()
        model.train()
        token_logprobs(model, batch)[0].sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_way_to_compute_experts_sees_the_replay(mixture: str, implementation: str) -> None:
    model, batch = load_model(mixture), batch_of()
    expected = token_logprobs(model, batch)[0]
    model.set_experts_implementation(implementation)
    torch.testing.assert_close(token_logprobs(model, batch)[0], expected, atol=2e-6, rtol=0)


def test_packing_changes_nothing(mixture: str) -> None:
    batch = trajectories(6)
    whole = engine(mixture).logprobs(batch)
    apart = engine(mixture, max_tokens_per_microbatch=max(map(len, batch))).logprobs(batch)
    without = engine(mixture).logprobs([replace(t, routed_experts=None) for t in batch])
    for a, b in zip(whole, apart, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert max(np.nanmax(np.abs(a - b)) for a, b in zip(whole, without, strict=True)) > 0.1


def test_reference_and_proximal_policy_replay_too(mixture: str) -> None:
    """At the first step both have the current weights, so also its log-probs, but only with the same routing."""
    trainer = engine(mixture, {"kl": {"coefficient": 0.1}}, proximal={"every": 1})
    result = trainer.train(trajectories(), 0)
    assert result.ref_logprobs is not None
    assert result.proximal_logprobs is not None
    for own, ref, proximal in zip(result.logprobs, result.ref_logprobs, result.proximal_logprobs, strict=True):
        np.testing.assert_allclose(ref, own, atol=2e-6)
        np.testing.assert_allclose(proximal, own, atol=2e-6)
    assert result.metrics["routing_differed"] > 0.5  # what was recorded is random


def test_differing_tokens_are_counted_by_layer_and_turn(mixture: str) -> None:
    trainer = engine(mixture, max_tokens_per_microbatch=60)
    batch = trajectories(6)
    routed: list[np.ndarray] = []
    for t in batch:
        own = own_routing(trainer.model, pack([t], [0.0])).numpy().copy()
        own[-1] = -1
        first = int(np.flatnonzero(t.turn_ids == 1)[0])
        own[first, 1] = [e for e in range(NUMBER) if e not in own[first, 1]][:K]
        routed.append(own)
    result = trainer.train([replace(t, routed_experts=r) for t, r in zip(batch, routed, strict=True)], 0)
    assert result.metrics["num_microbatches"] > 1
    rows = {(row["layer"], row["turn"]): row for row in result.mismatch if row["part"] == "routing"}
    turns = np.concatenate([t.turn_ids[:-1] for t in batch])
    assert rows.keys() == {(layer, turn) for layer in range(LAYERS) for turn in (-1, 0, 1)}
    for (layer, turn), row in rows.items():
        assert row["n"] == (turns == turn).sum()
        assert row["routing_differed"] == pytest.approx(6 / row["n"] if (layer, turn) == (1, 1) else 0)
    assert result.metrics["routing_differed"] == pytest.approx(6 / (2 * len(turns)))


def test_without_recorded_routing_nothing_is_counted(mixture: str) -> None:
    result = engine(mixture).train(trajectories(experts=None), 0)
    assert "routing_differed" not in result.metrics
    assert not [row for row in result.mismatch if row["part"] == "routing"]
    assert RoutingTally().rows() == []


def test_one_forward_s_routing_is_not_the_next_one_s(mixture: str) -> None:
    model, batch = load_model(mixture), batch_of()
    plain = token_logprobs(model, replace(batch, routed_experts=None))[0]
    token_logprobs(model, batch)
    assert torch.equal(token_logprobs(model, replace(batch, routed_experts=None))[0], plain)


def test_a_routing_of_another_model_is_refused(mixture: str) -> None:
    dense = load_model(str(model_directory("builtin:tiny-qwen3")))
    with pytest.raises(ValueError, match="no mixture of experts"):
        token_logprobs(dense, batch_of())
    replay = RoutingReplay(AutoModelForCausalLM.from_pretrained(mixture))
    rng = np.random.default_rng(0)
    for other in ((NUMBER, LAYERS + 1, K), (NUMBER + 9, LAYERS, K)):
        with pytest.raises(ValueError, match="recorded with another model"):
            replay.replay(torch.from_numpy(random_routing(rng, 50, other)))


def test_a_batch_is_recorded_throughout_or_not_at_all() -> None:
    recorded, (plain,) = trajectories(3), trajectories(1, experts=None)
    with pytest.raises(ValueError, match="episode 0 has no recorded routing"):
        pack([*recorded[1:], plain], [0.0] * 3)
    silent = random_trajectory(np.random.default_rng(8), 8, turns=0)
    batch = pack([recorded[0], silent], [0.0] * 2)
    assert batch.routed_experts is not None
    assert batch.routed_experts.dtype == torch.int16
    assert (batch.routed_experts[-len(silent) :] == -1).all()
    with pytest.raises(ValueError, match="shapes"):
        pack([recorded[0], random_trajectory(np.random.default_rng(1), 1, experts=(NUMBER, 1, K))], [0.0] * 2)


def test_weights_stay_finite_where_the_recorded_experts_became_improbable() -> None:
    logits = torch.tensor([[500.0, 0.0, -1.0, -2.0]], requires_grad=True)
    weights = replayed_weights(logits, torch.tensor([[1, 2]]))
    expected = 1 / (1 + np.exp(-1))
    assert weights.tolist()[0] == pytest.approx([expected, 1 - expected])
    (gradient,) = torch.autograd.grad(weights[0, 0], logits)
    assert gradient.tolist()[0] == pytest.approx([0, expected * (1 - expected), -expected * (1 - expected), 0])
