"""The embedded engine: the conformance suite on several models, and what is its own: slots, batching, failures."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
)

from agent_rl.records import IntArray, SamplingParams
from agent_rl.registry import find
from agent_rl.rollout.embedded.qwen3 import Qwen3Forward
from agent_rl.rollout.embedded.sampling import SamplingTable, uniform
from agent_rl.rollout.engines.embedded import EmbeddedEngine
from agent_rl.weights.base import WeightFile, WeightsLostError
from tests.rollout.engine_conformance import (
    CHECKS,
    PARITY,
    check_parity_over_turns,
    reference_logprobs,
)
from tests.rollout.random_models import CONTEXT, MODELS, generate_all, ids, make_engine, subject_of


def computed_tokens(engine: EmbeddedEngine) -> list[int]:
    """From now on, the number of tokens that each step of `engine` computes."""
    forward, counts = engine._forward, []

    def counting(step):
        counts.append(len(step.token_ids))
        return forward(step)

    engine._forward = counting
    return counts


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_conformance(model_path, name, check):
    check(subject_of(model_path(name)))


@pytest.mark.parametrize(("temperature", "top_p"), PARITY)
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_parity_over_turns(model_path, name, temperature, top_p):
    check_parity_over_turns(subject_of(model_path(name)), temperature, top_p)


@pytest.mark.parametrize("name", ["qwen3_grouped", "qwen3_moe_mixed", "qwen3_moe_biased"])
def test_parity_of_other_shapes(model_path, name):
    check_parity_over_turns(subject_of(model_path(name)), 0.7, 0.9)


@pytest.mark.parametrize("keys", [{"prefill_tokens_per_step": 5}, {"slots": 2}, {"slots": 64}])
def test_parity_with_chunked_prefill_and_scarce_or_ample_slots(model_path, keys):
    check_parity_over_turns(subject_of(model_path("qwen3"), **keys), 0.7, 0.9)


def test_the_registry_finds_it_and_only_plain_qwen3_takes_the_fused_path(model_path):
    assert find("engine", "embedded") is EmbeddedEngine
    fused = {name: isinstance(make_engine(model_path(name))._forward, Qwen3Forward) for name in MODELS}
    assert fused == {name: name not in ("llama", "qwen3_moe_biased") for name in MODELS}


def test_the_same_submissions_give_the_same_bits(model_path):
    prompts, params = ids(3, 17, 9), [SamplingParams(max_new_tokens=20, seed=s) for s in range(3)]
    first, second = (generate_all(make_engine(model_path("qwen3")), prompts, params) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.token_ids.tobytes() == b.token_ids.tobytes()
        assert a.behavior_logprobs.tobytes() == b.behavior_logprobs.tobytes()


def test_companions_do_not_change_what_is_sampled(model_path):
    prompt, own = ids(12)[0], SamplingParams(0.9, top_p=0.95, max_new_tokens=30, seed=42)
    alone = generate_all(make_engine(model_path("qwen3")), [prompt], [own])[0]
    mixed = [
        SamplingParams(max_new_tokens=9),
        SamplingParams(0.0, max_new_tokens=40),
        own,
        SamplingParams(2.0, top_k=5),
    ]
    among = generate_all(make_engine(model_path("qwen3")), [*ids(30, 2), prompt, ids(5)[0]], mixed)[2]
    assert among.token_ids.tolist() == alone.token_ids.tolist()
    assert among.sampling_mask.token_ids.tolist() == alone.sampling_mask.token_ids.tolist()
    another = generate_all(make_engine(model_path("qwen3")), [prompt], [SamplingParams(0.9, 0.95, max_new_tokens=30)])[
        0
    ]
    assert another.token_ids.tolist() != alone.token_ids.tolist()


def test_a_further_turn_computes_only_what_was_appended(model_path):
    engine, prompt, params = make_engine(model_path("qwen3")), ids(20)[0], SamplingParams(max_new_tokens=6)

    async def main() -> None:
        counts = computed_tokens(engine)
        completion = await engine.generate(0, prompt, params)
        longer = np.concatenate([prompt, completion.token_ids, ids(4, seed=1)[0]])
        await engine.generate(0, longer, params)
        assert counts == [20, 1, 1, 1, 1, 1, 5, 1, 1, 1, 1, 1]
        changed = longer.copy()
        changed[10] += 1 if changed[10] == 0 else -1
        counts.clear()
        await engine.generate(0, changed, params)
        assert counts[0] == len(changed) - 10

    asyncio.run(main())


def test_token_n_of_a_request_is_drawn_with_number_n_of_its_seed(model_path):
    path = model_path("qwen3")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for prompt in ids(3, 14):
        params = SamplingParams(max_new_tokens=5, seed=6)
        tokens = generate_all(make_engine(path), [prompt], [params])[0].token_ids
        table = SamplingTable(1)
        table.set(0, params, 61)
        draws = uniform(table.stream[[0] * 5], np.arange(5))
        with torch.no_grad():
            whole = torch.from_numpy(np.concatenate([prompt, tokens])).long()
            cdf = torch.softmax(model(whole[None]).logits[0, len(prompt) - 1 : -1].double(), -1).cumsum(-1).numpy()
        assert tokens.tolist() == [int(np.searchsorted(row, u)) for row, u in zip(cdf, draws, strict=True)]


def test_a_lone_row_in_a_high_slot_reads_its_own_keys(model_path):
    path = model_path("qwen3_grouped")
    engine, prompts, params = make_engine(path), ids(*range(4, 12)), SamplingParams(max_new_tokens=4, seed=1)
    first = generate_all(engine, prompts, [params] * 8)[7]
    longer = np.concatenate([prompts[7], first.token_ids, ids(3)[0]])
    completion = asyncio.run(engine.generate(7, longer, params))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected = reference_logprobs(model, longer, completion, 1.0)
    np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=2e-5, rtol=0)


def test_the_least_recently_used_idle_sequence_loses_its_slot(model_path):
    engine, params = make_engine(model_path("qwen3"), slots=2), SamplingParams(max_new_tokens=1)

    async def main() -> None:
        counts = computed_tokens(engine)
        for sequence in (0, 1, 0, 2, 0, 1):
            await engine.generate(sequence, ids(10)[0], params)
        assert counts == [10, 10, 1, 10, 1, 10]
        engine.release(0)
        engine.release(0)
        counts.clear()
        await engine.generate(1, ids(10)[0], params)
        await engine.generate(0, ids(10)[0], params)
        assert counts == [1, 10]

    asyncio.run(main())


def test_requests_beyond_the_slots_are_served_in_order(model_path):
    engine, done = make_engine(model_path("qwen3"), slots=2), []

    async def call(sequence: int, prompt: IntArray) -> None:
        await engine.generate(sequence, prompt, SamplingParams(max_new_tokens=4))
        done.append(sequence)

    async def main() -> None:
        await asyncio.gather(*(call(i, p) for i, p in enumerate(ids(3, 9, 1, 7, 2))))

    asyncio.run(main())
    assert done == [0, 1, 2, 3, 4]


def test_a_cancelled_row_and_a_cancelled_queued_request_free_their_places(model_path):
    engine, long = make_engine(model_path("qwen3"), slots=1), SamplingParams(max_new_tokens=100)

    async def main() -> None:
        running, queued, last = (asyncio.create_task(engine.generate(i, ids(5)[0], long)) for i in range(3))
        for _ in range(5):
            await asyncio.sleep(0)
        running.cancel()
        queued.cancel()
        assert len((await last).token_ids) == 100
        engine.release(2)

    asyncio.run(main())
    assert not engine._running
    assert not engine._queue


def test_an_exception_in_a_step_reaches_every_waiting_request(model_path):
    engine = make_engine(model_path("qwen3"), slots=2)

    def broken(step):
        raise OSError("no memory")

    async def main() -> None:
        working, engine._forward = engine._forward, broken
        calls = (engine.generate(i, p, SamplingParams()) for i, p in enumerate(ids(3, 4, 5)))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(r) for r in results] == ["no memory"] * 3
        engine._forward = working
        assert len((await engine.generate(0, ids(3)[0], SamplingParams(max_new_tokens=2))).token_ids) == 2

    asyncio.run(main())


def test_broken_weights_are_named_and_good_ones_mend_the_engine(model_path, tmp_path):
    path = model_path("qwen3")
    engine, good = make_engine(path), str(Path(path) / "other.safetensors")
    broken = {n: torch.full_like(p, float("nan")) for n, p in load_file(good).items()}
    save_file(broken, tmp_path / "nan.safetensors")

    async def main() -> None:
        await engine.generate(0, ids(5)[0], SamplingParams(max_new_tokens=2))
        await engine.update_weights(WeightFile(tmp_path / "nan.safetensors"), 1)
        with pytest.raises(ValueError, match="not finite: training has diverged"):
            await engine.generate(1, ids(50)[0], SamplingParams(max_new_tokens=2))
        await engine.update_weights(WeightFile(Path(good)), 2)
        calls = (engine.generate(i, p, SamplingParams(max_new_tokens=2)) for i, p in enumerate(ids(60, 5)))
        for completion in await asyncio.gather(*calls):
            assert completion.policy_versions.tolist() == [2, 2]

    asyncio.run(main())


def test_closing_fails_what_waits_and_refuses_what_comes(model_path):
    engine = make_engine(model_path("qwen3"))

    async def main() -> None:
        call = asyncio.create_task(engine.generate(0, ids(3)[0], SamplingParams(max_new_tokens=100)))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await call
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate(0, ids(3)[0], SamplingParams())

    asyncio.run(main())


def test_a_weights_file_of_another_model_changes_nothing(model_path, tmp_path):
    path = model_path("qwen3")
    engine = make_engine(path)
    prompt, params = ids(8), [SamplingParams(max_new_tokens=5)]
    before = generate_all(engine, prompt, params)[0]
    weights = load_file(Path(path) / "other.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "missing": {n: w for n, w in weights.items() if n != name},
        "unknown": {**weights, "model.extra": torch.zeros(1)},
        r"as \(2, 2\), the model has \(64, 48\)": {**weights, name: torch.zeros(2, 2)},
    }
    for number, (message, content) in enumerate(cases.items()):
        save_file(content, tmp_path / f"{number}.safetensors")
        with pytest.raises(ValueError, match=message):
            asyncio.run(engine.update_weights(WeightFile(tmp_path / f"{number}.safetensors"), 1))
    (tmp_path / "text.safetensors").write_text("no weights")
    for absent in ("absent.safetensors", "text.safetensors"):
        with pytest.raises(ValueError, match=absent):
            asyncio.run(engine.update_weights(WeightFile(tmp_path / absent), 1))
    assert engine.policy_version == 0
    engine.release(0)
    assert generate_all(engine, prompt, params)[0].token_ids.tolist() == before.token_ids.tolist()


@dataclass(frozen=True)
class CutShort(WeightFile):
    """Weights that are lost after the first tensor, as when the trainer dies in the middle of a broadcast."""

    async def tensors(self, membership):
        async for tensors in super().tensors(membership):
            yield tensors
            raise WeightsLostError("the trainer is gone")


def test_an_engine_with_half_of_two_versions_samples_no_more(model_path):
    path = model_path("qwen3")
    engine = make_engine(path)

    async def main() -> None:
        call = asyncio.create_task(engine.generate(0, ids(3)[0], SamplingParams(max_new_tokens=100)))
        await asyncio.sleep(0)
        with pytest.raises(WeightsLostError):
            await engine.update_weights(CutShort(Path(path) / "other.safetensors"), 1)
        for lost in (call, engine.generate(1, ids(3)[0], SamplingParams())):
            with pytest.raises(RuntimeError, match="closed"):
                await lost

    asyncio.run(main())


def test_bad_input_is_refused_with_a_sentence(model_path, tmp_path):
    path = model_path("qwen3")
    engine = make_engine(path)

    async def twice() -> None:
        await asyncio.gather(*(engine.generate(5, ids(3)[0], SamplingParams(max_new_tokens=3)) for _ in range(2)))

    for prompt, message in (([], "at least one token"), ([1] * CONTEXT, "leave room"), ([61], "vocabulary of 61")):
        with pytest.raises(ValueError, match=message):
            asyncio.run(engine.generate(0, np.array(prompt, np.int32), SamplingParams()))
    with pytest.raises(ValueError, match="already has a request"):
        asyncio.run(twice())
    with pytest.raises(ValueError, match=r"no config\.json"):
        make_engine(str(tmp_path))
    with pytest.raises(ValueError, match="32768 positions"):
        EmbeddedEngine(EmbeddedEngine.Config(max_sequence_tokens=40000), path)
