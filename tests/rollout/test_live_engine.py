"""What becomes of running generations when weights arrive: on a real engine, against a plain forward."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_rl.records import Completion, FinishReason, IntArray, SamplingParams
from agent_rl.rollout.engines.embedded import EmbeddedEngine
from agent_rl.rollout.live_engine import LiveEngine, Update
from agent_rl.weights.base import WeightFile
from agent_rl.weights.transfer.group import GroupMembership
from tests.rollout.engine_conformance import Subject, prompts_of, reference_logprobs, reference_model, reference_routing

CONTEXT = 128
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=36, seed=4)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, head_dim=8, num_attention_heads=4, num_key_value_heads=2,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, initializer_range=0.25,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(directory)
    other = {name: p * 0.9 + 0.05 * torch.randn_like(p) for name, p in model.named_parameters()}
    save_file(other, directory / "other.safetensors")
    embedded = EmbeddedEngine.Config(max_concurrent_sequences=4, max_sequence_tokens=CONTEXT)
    path = str(directory)
    return Subject(lambda: EmbeddedEngine(embedded, path), path, str(directory / "other.safetensors"), CONTEXT)


def updated_once(subject: Subject, update: Update, prompts: list[IntArray]) -> list[Completion]:
    """Completions of `prompts` during which version 3 arrives."""

    async def main() -> list[Completion]:
        engine = LiveEngine(subject.make(), update)
        calls = [asyncio.create_task(engine.generate(i, p, PARAMS, 0)) for i, p in enumerate(prompts)]
        for _ in range(12):
            await asyncio.sleep(0)
        await engine.update_weights(subject.others(3), 3)
        assert engine.policy_version == 3
        found = await asyncio.gather(*calls)
        await engine.close()
        return list(found)

    return asyncio.run(main())


def check_versions(subject: Subject, prompts: list[IntArray], found: list[Completion]) -> None:
    """Old tokens fit the old weights, new ones the new weights over all of the sequence."""
    models = {0: reference_model(subject), 3: reference_model(subject, updated=True)}
    for prompt, completion in zip(prompts, found, strict=True):
        versions = completion.policy_versions
        assert np.array_equal(np.sort(versions), versions)
        assert len(completion.token_ids) == PARAMS.max_new_tokens
        assert completion.finish_reason is FinishReason.LENGTH
        for version, model in models.items():
            own = versions == version
            expected = reference_logprobs(model, prompt, completion, PARAMS.temperature)
            assert np.abs(completion.behavior_logprobs - expected)[own].max(initial=0) < subject.tolerance
        assert completion.routed_experts is not None
        assert len(completion.routed_experts) == len(prompt) + len(completion.token_ids) - 1


@pytest.mark.parametrize("update", ["in_flight", "abort"])
def test_a_completion_that_meets_new_weights_has_both_versions(subject: Subject, update: Update) -> None:
    prompts = prompts_of(reference_model(subject), [5, 11])
    found = updated_once(subject, update, prompts)
    check_versions(subject, prompts, found)
    for completion in found:
        assert set(completion.policy_versions.tolist()) == {0, 3}


@dataclass(frozen=True)
class InParts(WeightFile):
    """Weights that take their time, as those that are received do: other tasks run between two tensors."""

    async def tensors(self, membership: GroupMembership) -> AsyncIterator[dict[str, Tensor]]:
        async for tensors in super().tensors(membership):
            yield tensors
            await asyncio.sleep(0.001)


def test_nothing_is_sampled_while_weights_come_in_parts(subject: Subject) -> None:
    prompts = prompts_of(reference_model(subject), [5, 11])
    found = updated_once(replace(subject, send=lambda path, version: InParts(path)), "in_flight", prompts)
    check_versions(subject, prompts, found)
    for completion in found:
        assert set(completion.policy_versions.tolist()) == {0, 3}


def test_an_aborted_completion_draws_afresh_and_its_routing_is_of_each_part_s_weights(subject: Subject) -> None:
    prompts = prompts_of(reference_model(subject), [5, 11])
    aborted, running = (updated_once(subject, update, prompts) for update in ("abort", "in_flight"))  # type: ignore[arg-type]
    for prompt, completion, other in zip(prompts, aborted, running, strict=True):
        old = int((completion.policy_versions == 0).sum())
        assert np.array_equal(completion.token_ids[:old], other.token_ids[:old])
        # The rest of the turn must not repeat the draws that its beginning was made with.
        assert not np.array_equal(completion.token_ids[old : 2 * old], completion.token_ids[:old])
        tokens = np.concatenate([prompt, completion.token_ids[:-1]])
        cut = len(prompt) + old - 1
        before, after = (reference_routing(reference_model(subject, updated=u), tokens) for u in (False, True))
        assert completion.routed_experts is not None
        routed = np.sort(completion.routed_experts, -1)
        np.testing.assert_array_equal(routed[:cut], np.sort(before[:cut], -1))
        np.testing.assert_array_equal(routed[cut:], np.sort(after[cut:], -1))


def test_draining_ends_what_runs_and_starts_nothing(subject: Subject) -> None:
    prompts = prompts_of(reference_model(subject), [5, 11, 7])

    async def body(engine: LiveEngine) -> list[Completion]:
        running = [asyncio.create_task(engine.generate(i, prompts[i], PARAMS)) for i in range(2)]
        await asyncio.sleep(0.01)
        update = asyncio.create_task(engine.update_weights(subject.others(3), 3))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(2, prompts[2], PARAMS))
        await update
        assert all(call.done() for call in running)
        assert not late.done()
        return [*await asyncio.gather(*running), await late]

    found = run(subject, "drain", body)
    assert [set(completion.policy_versions.tolist()) for completion in found] == [{0}, {0}, {3}]


def test_a_drain_before_weights_are_sent_holds_until_they_have_come(subject: Subject) -> None:
    prompts = prompts_of(reference_model(subject), [5, 7])

    async def body(engine: LiveEngine) -> list[Completion]:
        running = asyncio.create_task(engine.generate(0, prompts[0], PARAMS))
        await asyncio.sleep(0.01)
        await engine.ready()
        assert running.done()
        late = asyncio.create_task(engine.generate(1, prompts[1], PARAMS))
        for _ in range(100):
            await asyncio.sleep(0)
        assert engine._running == 0
        await engine.update_weights(subject.others(3), 3)
        return [await running, await late]

    found = run(subject, "drain", body)
    assert [set(completion.policy_versions.tolist()) for completion in found] == [{0}, {3}]


def test_an_update_that_fails_lets_generations_go_on(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "wrong.safetensors").write_bytes(b"none")

    async def body(engine: LiveEngine) -> list[Completion]:
        with pytest.raises(Exception, match=r"safetensors|header|invalid"):
            await engine.update_weights(WeightFile(tmp_path / "wrong.safetensors"), 1)
        return [await engine.generate(0, prompts_of(reference_model(subject), [4])[0], PARAMS)]

    assert set(run(subject, "drain", body)[0].policy_versions.tolist()) == {0}


def run(subject: Subject, update: Update, body: Callable[[LiveEngine], Awaitable[list[Any]]]) -> list[Any]:
    async def main() -> list[Any]:
        engine = LiveEngine(subject.make(), update)
        found = await body(engine)
        await engine.close()
        return found

    return asyncio.run(main())
