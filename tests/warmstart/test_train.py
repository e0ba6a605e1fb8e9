"""The warm start itself, in small: the loss falls, the seed decides the weights, the directory loads."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_rl.settings import check
from agent_rl.warmstart import Progress, WarmstartConfig, run
from agent_rl.warmstart.config import ExpertsConfig
from agent_rl.warmstart.tokenizer import build_tokenizer
from agent_rl.warmstart.traces import Trace
from agent_rl.warmstart.train import build_model, collate, longest_chain, loss_of

SHIPPED = Path(__file__).parents[2] / "configs" / "warmstart.yaml"


def config(output: Path, num_steps: int) -> WarmstartConfig:
    """The shipped config with short stages and small batches."""
    shipped = yaml.safe_load(SHIPPED.read_text())
    stages = {name: shipped[name] | {"num_steps": num_steps} for name in ("teach", "hide")}
    return check(WarmstartConfig, shipped | stages | {"output": output, "batch_size": 4})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_a_short_warm_start_lowers_the_loss_and_writes_a_model(tmp_path: Path) -> None:
    seen: list[Progress] = []
    threads = torch.get_num_threads()
    run(config(tmp_path, 30), seen.append)
    assert torch.get_num_threads() == threads
    assert [(p.step, p.num_steps) for p in seen] == [(i + 1, 60) for i in range(60)]
    first, last = (sum(p.loss for p in part) / 5 for part in (seen[:5], seen[-5:]))
    assert first > 2.5
    assert last < 1.5
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert sum(w.numel() for name, w in weights(tmp_path).items() if name != "lm_head.weight") == 305_856


def test_a_warm_start_of_a_mixture_lowers_the_loss_and_uses_every_expert(tmp_path: Path) -> None:
    shipped = yaml.safe_load((SHIPPED.parent / "warmstart_moe.yaml").read_text())
    settings = config(tmp_path, 20).model_copy(update={"experts": ExpertsConfig(**shipped["experts"])})
    seen: list[Progress] = []
    run(settings, seen.append)
    assert sum(p.loss for p in seen[-5:]) / 5 < 2 < seen[0].loss
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3_moe"
    assert model.num_parameters() == 417_600
    found = model(torch.arange(9, 105)[None], output_router_logits=True).router_logits
    chosen = torch.stack(found).topk(2).indices
    assert [len(layer.unique()) for layer in chosen] == [4, 4, 4]


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    runs = []
    for i, seed in enumerate((0, 0, 1)):
        torch.manual_seed(i)
        run(config(tmp_path / str(i), 3).model_copy(update={"seed": seed}), lambda progress: None)
        runs.append(weights(tmp_path / str(i)))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not torch.equal(runs[0]["model.embed_tokens.weight"], runs[2]["model.embed_tokens.weight"])


def test_building_a_model_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    build_model(build_tokenizer(1024), seed=3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_longest_chain_grows_over_the_curriculum() -> None:
    shipped = check(WarmstartConfig, yaml.safe_load(SHIPPED.read_text())).teach
    stage = shipped.model_copy(update={"num_steps": 100, "curriculum": 0.4})
    assert [longest_chain(step, stage, 5) for step in (0, 9, 10, 20, 30, 39, 40, 99)] == [1, 1, 2, 3, 4, 4, 5, 5]
    assert longest_chain(0, stage.model_copy(update={"curriculum": 0.0}), 5) == 5


def test_loss_of_packed_traces_is_their_weighted_mean_cross_entropy() -> None:
    tokenizer = build_tokenizer(1024)
    model = build_model(tokenizer, seed=0)
    traces = [Trace() for _ in range(3)]
    for trace, answer in zip(traces, ("1", "22", "1234" * 16), strict=True):
        trace.context("<|user|>s37 *4")
        trace.turn(answer)
    total = weight_sum = 0.0
    with torch.no_grad():
        for trace in traces:
            ids = tokenizer.encode(trace.text)
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            context = len(tokenizer.encode(trace.pieces[0]))
            for t in range(1, len(ids)):
                weight = 0.1 if t < context else 1.0
                total -= weight * logprobs[t - 1, ids[t]].item()
                weight_sum += weight
        batch = collate(tokenizer, traces, 0.1)
        loss = loss_of(model, batch).item()
    assert batch.token_ids.shape[0] == 2, "the two short traces share a row"
    assert loss == pytest.approx(total / weight_sum, rel=1e-5)


def test_a_share_must_be_a_probability() -> None:
    shipped = yaml.safe_load(SHIPPED.read_text())
    shipped["teach"]["mix"]["direct"] = 1.5
    with pytest.raises(ValueError, match=r"teach\.mix\.direct: Input should be less than or equal to 1"):
        check(WarmstartConfig, shipped)


def test_a_misspelt_key_is_named() -> None:
    shipped = yaml.safe_load(SHIPPED.read_text())
    shipped["hide"]["num_step"] = 3
    with pytest.raises(ValueError, match=r"unknown key 'hide\.num_step'; did you mean 'num_steps'"):
        check(WarmstartConfig, shipped)


def test_output_must_be_a_directory(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(ValueError, match="taken is not a directory; name one"):
        config(taken, 1)
