"""The supervised warm start: a tiny Qwen3 model learns what an episode looks like, mistakes included."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from agent_rl.warmstart.config import ExpertsConfig, StageConfig, WarmstartConfig
from agent_rl.warmstart.tokenizer import build_tokenizer
from agent_rl.warmstart.traces import Trace, draw_trace

CONTEXT_LENGTH = 1024

Document = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Progress:
    """One optimizer step: `step` of `num_steps` over both stages, and its loss in nats."""

    step: int
    num_steps: int
    loss: float


def run(config: WarmstartConfig, on_progress: Callable[[Progress], None]) -> None:
    """Train from random weights through both stages and write the model directory `config.output`.

    Consumes traces drawn from `config.seed`; calls `on_progress` after every optimizer step. The same config
    gives the same weights on the same machine, whatever the number of torch threads was before.
    """
    config.output.mkdir(parents=True, exist_ok=True)  # before the minutes of training, not after them
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokenizer = build_tokenizer(CONTEXT_LENGTH)
        model = build_model(tokenizer, config.seed, config.experts)
        for progress in train(model, tokenizer, config):
            on_progress(progress)
    finally:
        torch.set_num_threads(threads)
    disable_progress_bar()  # transformers' own, beneath the one of the command
    model.save_pretrained(config.output)
    tokenizer.save_pretrained(config.output)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, experts: ExpertsConfig | None = None) -> PreTrainedModel:
    """A Qwen3 model with random float32 weights from `seed`: 305,856 parameters, or a mixture of experts."""
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if experts is None:
            return Qwen3ForCausalLM(Qwen3Config(**shape))
        routed = {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_experts_per_token,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": True,
            "router_aux_loss_coef": experts.balance,
        }
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **routed))


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, config: WarmstartConfig) -> Iterator[Progress]:
    """Run both stages, each with fresh optimizers; yields after every optimizer step."""
    model.train()
    rng = random.Random(f"warmstart/{config.seed}")
    num_steps = config.teach.num_steps + config.hide.num_steps
    done = 0
    for stage in (config.teach, config.hide):
        optimizers = _optimizers(model, stage)
        schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, stage.num_steps) for o in optimizers]
        for step in range(stage.num_steps):
            longest = longest_chain(step, stage, config.max_chain_steps)
            traces = [draw_trace(rng, stage.mix, longest) for _ in range(config.batch_size)]
            loss = loss_of(model, collate(tokenizer, traces, config.context_weight))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            model.zero_grad()
            done += 1
            yield Progress(done, num_steps, loss.item())


def longest_chain(step: int, stage: StageConfig, max_chain_steps: int) -> int:
    """Longest chain shown at `step`: grows linearly from 1 to `max_chain_steps` over the curriculum, then stays."""
    ramp = stage.curriculum * stage.num_steps
    return max_chain_steps if step >= ramp else 1 + int((max_chain_steps - 1) * step / ramp)


@dataclass(frozen=True)
class Batch:
    """Traces packed into rows, all fields [rows, length]; padding on the right has weight 0."""

    token_ids: Tensor
    position_ids: Tensor
    weights: Tensor


def collate(tokenizer: PreTrainedTokenizerFast, traces: list[Trace], context_weight: float) -> Batch:
    """Tokenize and pack `traces`; the positions of each start at 0, which also keeps them apart in attention.

    The first token of a trace has weight 0: nothing precedes it that could predict it.
    """
    encoded: Any = tokenizer([piece for trace in traces for piece in trace.pieces], add_special_tokens=False)
    pieces = iter(encoded.input_ids)
    documents = []
    for trace in traces:
        ids: list[int] = []
        weights: list[float] = []
        for written in trace.written:
            piece = next(pieces)
            ids += piece
            weights += [1.0 if written else context_weight] * len(piece)
        documents.append((torch.tensor(ids), torch.arange(len(ids)), torch.tensor([0.0, *weights[1:]])))
    rows = [[torch.cat(field) for field in zip(*row, strict=True)] for row in _pack(documents)]
    token_ids, position_ids, loss_weights = (list(column) for column in zip(*rows, strict=True))
    return Batch(
        pad_sequence(token_ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad_sequence(position_ids, batch_first=True),
        pad_sequence(loss_weights, batch_first=True),
    )


def _pack(documents: list[Document]) -> list[list[Document]]:
    """First-fit decreasing into rows no longer than the longest document."""
    documents = sorted(documents, key=lambda document: -len(document[0]))
    capacity = len(documents[0][0])
    rows: list[list[Document]] = []
    space: list[int] = []
    for document in documents:
        size = len(document[0])
        place = next((i for i, left in enumerate(space) if left >= size), len(rows))
        if place == len(rows):
            rows.append([])
            space.append(capacity)
        rows[place].append(document)
        space[place] -= size
    return rows


def loss_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Weighted mean cross entropy in nats over the tokens of a batch; a mixture of experts adds its balance loss."""
    mixture = {"output_router_logits": True} if model.config.model_type == "qwen3_moe" else {}
    output = model(input_ids=batch.token_ids, position_ids=batch.position_ids, use_cache=False, **mixture)
    losses = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), batch.token_ids[:, 1:], reduction="none")
    weights = batch.weights[:, 1:]
    loss: Tensor = (losses * weights).sum() / weights.sum()
    return loss + model.config.router_aux_loss_coef * output.aux_loss if mixture else loss


def _optimizers(model: PreTrainedModel, stage: StageConfig) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings, norms and experts, which are stacked matrices."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=stage.muon_lr, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=stage.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
