"""What every engine must do, checked against a plain Hugging Face forward of the whole sequence.

A test module of an engine parametrizes over `CHECKS` and gives each a `Subject`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_rl.records import Completion, FinishReason, IntArray, SamplingParams, StopReason, TrajectoryBuilder
from agent_rl.rollout.engines.base import Engine
from agent_rl.routers import routers
from agent_rl.weights.base import WeightFile, Weights

SHORT = SamplingParams(max_new_tokens=8)
"""Of a request that is submitted last: when it is answered, those before it are under way and far from their end."""


@dataclass(frozen=True)
class Subject:
    """An engine to check: `make` gives a fresh one on `model_path` at version 0; `other_weights` is a
    safetensors file for the same model; the engine's context holds `context` tokens. `send` gives the engine a file
    as some channel does, as a version."""

    make: Callable[[], Engine]
    model_path: str
    other_weights: str
    context: int
    tolerance: float = 1e-4
    send: Callable[[Path, int], Weights] = lambda path, version: WeightFile(path)

    def others(self, version: int) -> Weights:
        return self.send(Path(self.other_weights), version)


def reference_model(subject: Subject, *, updated: bool = False) -> Any:
    model = AutoModelForCausalLM.from_pretrained(subject.model_path, dtype=torch.float32).eval()
    if updated:
        model.load_state_dict(load_file(subject.other_weights), strict=False)
        model.tie_weights()
    return model


def reference_logprobs(model: Any, prompt: IntArray, completion: Completion, temperature: float) -> np.ndarray:
    """Log-probs of the sampled tokens after temperature, renormalised over the recorded kept sets, float32 [N]."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
    for row in range(len(completion.sampling_mask)):
        kept = completion.sampling_mask.row(row)
        if len(kept):
            hidden = torch.ones(logits.shape[-1], dtype=torch.bool)
            hidden[torch.from_numpy(kept.copy()).long()] = False
            logits[row, hidden] = float("-inf")
    return torch.log_softmax(logits, -1)[range(len(logits)), ids[len(prompt) :]].numpy()


def prompts_of(model: Any, lengths: list[int], seed: int = 0) -> list[IntArray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.config.vocab_size, n).astype(np.int32) for n in lengths]


def run(subject: Subject, body: Callable[[Engine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = subject.make()
        await body(engine)
        await engine.close()

    asyncio.run(main())


def check_parity_over_turns(subject: Subject, temperature: float, top_p: float) -> None:
    """Ragged concurrent episodes of three turns agree with a forward of the whole sequence, and only unshifted."""
    model = reference_model(subject)

    async def episode(engine: Engine, number: int, tokens: IntArray) -> None:
        for turn in range(3):
            params = SamplingParams(temperature, top_p, max_new_tokens=5 + 3 * number, seed=10 * number + turn)
            completion = await engine.generate(number, tokens, params)
            expected = reference_logprobs(model, tokens, completion, temperature)
            got = completion.behavior_logprobs
            np.testing.assert_allclose(got, expected, atol=subject.tolerance, rtol=0)
            error = np.abs(got - expected).mean()
            for shift in (-1, 1):
                assert np.abs(np.roll(got, shift) - expected).mean() > 100 * error
            tool = prompts_of(model, [2 + 3 * ((number + turn) % 4)], seed=number)[0]
            tokens = np.concatenate([tokens, completion.token_ids, tool])
        engine.release(number)

    async def body(engine: Engine) -> None:
        prompts = prompts_of(model, [3, 19, 1, 8, 30])
        await asyncio.gather(*(episode(engine, i, p) for i, p in enumerate(prompts)))

    run(subject, body)


def reference_routing(model: Any, token_ids: IntArray) -> np.ndarray:
    """The experts that the Hugging Face model chooses for each token of a sequence, int64 [L, layers, k]."""
    chosen: list[np.ndarray] = []
    hooks = [
        r.register_forward_hook(lambda _m, _i, out: chosen.append(out[2].numpy())) for r in routers(model).values()
    ]
    with torch.no_grad():
        model(torch.from_numpy(token_ids).long()[None])
    for hook in hooks:
        hook.remove()
    return np.stack(chosen, 1)


def routing_of(builder: TrajectoryBuilder, number: int) -> np.ndarray:
    whole = builder.build(
        group_id=0,
        episode_id=number,
        attempt=0,
        sampling_params=SamplingParams(0.8, 0.95),
        reward=0.0,
        reward_parts={},
        stop_reason=StopReason.ANSWER,
    )
    assert whole.routed_experts is not None
    return whole.routed_experts


def check_routing_over_turns(subject: Subject) -> None:
    """Ragged concurrent episodes: each turn's routing is asked for from the last reported row on; the whole, as
    sets, is that of a forward of the whole sequence. Of a mixture of experts without dense layers only."""
    model = reference_model(subject)

    async def episode(engine: Engine, number: int, prompt: IntArray) -> None:
        builder = TrajectoryBuilder()
        builder.append(prompt, -1)
        for turn in range(3):
            params = SamplingParams(0.8, 0.95, max_new_tokens=5 + 3 * number, seed=10 * number + turn)
            completion = await engine.generate(number, builder.token_ids, params, builder.num_routed)
            builder.append(completion.token_ids, turn, completion)
            builder.append(prompts_of(model, [3 * ((number + turn) % 4)], seed=number)[0], turn)
        tokens = builder.token_ids
        again = await engine.generate(number, tokens, SamplingParams(max_new_tokens=2), 0)
        unasked = await engine.generate(number, tokens, SamplingParams(max_new_tokens=2))
        engine.release(number)
        assert unasked.routed_experts is None
        assert again.routed_experts is not None
        expected = reference_routing(model, np.concatenate([tokens, again.token_ids[:-1]]))
        routed, reported = routing_of(builder, number), builder.num_routed
        assert routed.shape == (len(tokens), *expected.shape[1:])
        assert (routed[reported:] == -1).all()
        np.testing.assert_array_equal(np.sort(routed[:reported], -1), np.sort(expected[:reported], -1))
        np.testing.assert_array_equal(np.sort(again.routed_experts, -1), np.sort(expected, -1))

    async def body(engine: Engine) -> None:
        await asyncio.gather(*(episode(engine, i, p) for i, p in enumerate(prompts_of(model, [3, 19, 1, 8]))))

    run(subject, body)


def check_kept_sets(subject: Subject) -> None:
    """Kept sets are top-k then top-p of the distribution after temperature; singletons have log-prob exactly 0."""
    model = reference_model(subject)
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=12, max_new_tokens=40, seed=3)

    async def body(engine: Engine) -> None:
        prompt = prompts_of(model, [9])[0]
        completion = await engine.generate(0, prompt, params)
        ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
        with torch.no_grad():
            probs = torch.softmax(model(ids[None]).logits[0, 8:-1] / 0.7, -1)
        for row, (p, token) in enumerate(zip(probs.numpy(), completion.token_ids, strict=True)):
            kept = completion.sampling_mask.row(row)
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]
            expected = order[(np.arange(len(p)) < 12) & (before <= 0.9)]
            near_the_edge = np.abs(before - 0.9).min() < 1e-5
            assert token in kept
            assert near_the_edge or set(kept) == set(expected)
            assert (completion.behavior_logprobs[row] == 0) == (len(kept) == 1)

    run(subject, body)


def check_greedy(subject: Subject) -> None:
    """Temperature 0 takes the most probable token, with log-prob 0 and itself as the kept set."""
    model = reference_model(subject)

    async def body(engine: Engine) -> None:
        prompt = prompts_of(model, [7])[0]
        completion = await engine.generate(0, prompt, SamplingParams(temperature=0.0, max_new_tokens=12))
        ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
        with torch.no_grad():
            expected = model(ids[None]).logits[0, 6:-1].argmax(-1)
        assert completion.token_ids.tolist() == expected.tolist()
        assert completion.behavior_logprobs.tolist() == [0.0] * 12
        assert completion.sampling_mask.token_ids.tolist() == expected.tolist()

    run(subject, body)


def check_finish(subject: Subject) -> None:
    """A stop token ends the completion and belongs to it; otherwise length does, also where the context ends."""
    model = reference_model(subject)
    prompt = prompts_of(model, [6])[0]

    async def body(engine: Engine) -> None:
        free = await engine.generate(0, prompt, SamplingParams(max_new_tokens=20, seed=1))
        assert (len(free.token_ids), free.finish_reason) == (20, FinishReason.LENGTH)
        assert free.sampling_mask.sizes.tolist() == [0] * 20
        stop = int(free.token_ids[7])
        first = free.token_ids.tolist().index(stop)
        stopped = await engine.generate(1, prompt, SamplingParams(max_new_tokens=20, seed=1, stop_token_ids=(stop,)))
        assert stopped.finish_reason == FinishReason.STOP
        assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
        long = prompts_of(model, [subject.context - 3])[0]
        cut = await engine.generate(2, long, SamplingParams(max_new_tokens=20))
        assert (len(cut.token_ids), cut.finish_reason) == (3, FinishReason.LENGTH)

    run(subject, body)


def check_too_long(subject: Subject) -> None:
    """A prompt that leaves no room is refused with a sentence, and the engine goes on."""

    async def body(engine: Engine) -> None:
        with pytest.raises(ValueError, match="token"):
            await engine.generate(0, np.zeros(subject.context, np.int32), SamplingParams())
        completion = await engine.generate(1, np.zeros(4, np.int32), SamplingParams(max_new_tokens=2))
        assert len(completion.token_ids) == 2
        engine.release(12345)

    run(subject, body)


def check_update_between_turns(subject: Subject) -> None:
    """After an update the whole prefix is that of the new weights, also where the old ones had cached it."""
    model, updated = reference_model(subject), reference_model(subject, updated=True)
    params = SamplingParams(max_new_tokens=10, seed=2)

    async def body(engine: Engine) -> None:
        prompt = prompts_of(model, [15])[0]
        first = await engine.generate(0, prompt, params)
        await engine.update_weights(subject.others(7), 7)
        assert engine.policy_version == 7
        longer = np.concatenate([prompt, first.token_ids])
        second = await engine.generate(0, longer, params)
        assert first.policy_versions.tolist() == [0] * 10
        assert second.policy_versions.tolist() == [7] * 10
        expected = reference_logprobs(updated, longer, second, 1.0)
        np.testing.assert_allclose(second.behavior_logprobs, expected, atol=subject.tolerance, rtol=0)

    run(subject, body)


def check_update_in_mid_request(subject: Subject) -> None:
    """Tokens before the update agree with the old weights, those after it with the new ones over all of it."""
    model, updated = reference_model(subject), reference_model(subject, updated=True)
    prompts = prompts_of(model, [5, 11])
    params = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=subject.context - 20, seed=4)

    async def body(engine: Engine) -> None:
        await engine.ready()
        others = subject.others(3)  # before: the requests are not to end meanwhile
        calls = [asyncio.create_task(engine.generate(i, p, params)) for i, p in enumerate(prompts)]
        await engine.generate(99, prompts[0], SHORT)
        await engine.update_weights(others, 3)
        for prompt, completion in zip(prompts, await asyncio.gather(*calls), strict=True):
            new = completion.policy_versions == 3
            assert 0 < new.sum() < len(new)
            assert np.array_equal(np.sort(completion.policy_versions), completion.policy_versions)
            got = completion.behavior_logprobs
            old_fit = np.abs(got - reference_logprobs(model, prompt, completion, 0.7))
            new_fit = np.abs(got - reference_logprobs(updated, prompt, completion, 0.7))
            assert old_fit[~new].max() < subject.tolerance
            assert new_fit[new].max() < subject.tolerance
            assert np.isinf(old_fit[new]).any() or old_fit[new].max() > 100 * subject.tolerance

    run(subject, body)


def check_cancellation(subject: Subject) -> None:
    """A cancelled request leaves the others, and later turns of its own sequence, as they would have been."""
    model = reference_model(subject)
    prompts = prompts_of(model, [4, 9])
    params = SamplingParams(max_new_tokens=60, seed=5)

    async def body(engine: Engine) -> None:
        cancelled, other = (asyncio.create_task(engine.generate(i, p, params)) for i, p in enumerate(prompts))
        await engine.generate(99, prompts[0], SHORT)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        for prompt, completion in (
            (prompts[1], await other),
            (prompts[0], await engine.generate(0, prompts[0], params)),
        ):
            expected = reference_logprobs(model, prompt, completion, 1.0)
            np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=subject.tolerance, rtol=0)

    run(subject, body)


def check_interruption(subject: Subject) -> None:
    """What runs is handed out where it is, and its sequence goes on from there; the engine still serves others."""
    model = reference_model(subject)
    prompts = prompts_of(model, [6, 10])
    params = SamplingParams(0.7, 0.9, max_new_tokens=subject.context - 20, seed=6)

    async def body(engine: Engine) -> None:
        calls = [asyncio.create_task(engine.generate(i, p, params)) for i, p in enumerate(prompts)]
        await engine.generate(99, prompts[0], SHORT)
        engine.interrupt()
        other = await engine.generate(98, prompts[1], SHORT)
        assert other.finish_reason is FinishReason.LENGTH
        for number, (prompt, cut) in enumerate(zip(prompts, await asyncio.gather(*calls), strict=True)):
            assert cut.finish_reason is FinishReason.ABORT
            assert 0 < len(cut.token_ids) < params.max_new_tokens
            longer = np.concatenate([prompt, cut.token_ids])
            rest = await engine.generate(number, longer, SHORT)
            assert len(rest.token_ids) == SHORT.max_new_tokens
            for before, part, temperature in ((prompt, cut, 0.7), (longer, rest, 1.0)):
                expected = reference_logprobs(model, before, part, temperature)
                np.testing.assert_allclose(part.behavior_logprobs, expected, atol=subject.tolerance, rtol=0)

    run(subject, body)


UPDATES: list[Callable[[Subject], None]] = [check_update_between_turns, check_update_in_mid_request]
CHECKS: list[Callable[[Subject], None]] = [
    check_kept_sets,
    check_greedy,
    check_finish,
    check_too_long,
    *UPDATES,
    check_cancellation,
    check_interruption,
]
PARITY = [(temperature, top_p) for temperature in (1.0, 0.7) for top_p in (1.0, 0.9)]
