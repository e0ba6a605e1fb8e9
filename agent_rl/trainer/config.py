"""The keys under `trainer` of a run that trains with torch."""

import json
from typing import Any, Literal, Self

from pydantic import Field

from agent_rl.objective.loss import needs_proximal
from agent_rl.trainer.base import TrainerConfig
from agent_rl.trainer.layout import Layout
from agent_rl.trainer.model import ComputeConfig
from agent_rl.trainer.snapshots import ProximalConfig


class TorchConfig(TrainerConfig):
    """Keys of `trainer: torch`: layout, optimizer, batches, precision."""

    type: Literal["torch"] = "torch"
    dp: int = Field(1, ge=1)
    """Ranks that share the trajectories of a step; weights, gradients and optimizer are sharded over them (FSDP2).
    There are dp x tp ranks, a process each."""
    tp: int = Field(1, ge=1)
    """Ranks that share every matrix product by heads, rows or columns; must divide the heads, also of the keys."""
    ep: int = Field(1, ge=1)
    """Ranks that share the experts of a layer, whole experts each: the same number as `tp`, whose ranks they are;
    or 1, and every rank of `tp` has all."""
    learning_rate: float = Field(1e-6, gt=0)
    """AdamW's step size, constant."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's moment decays; the default is the SAT paper's."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's term against division by 0."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    gradient_alignment: bool = False
    """Log the cosine of each step's gradient to the last one's; costs a copy of the gradient."""
    max_cosine: float | None = Field(None, gt=0, lt=1)
    """Turn the gradient until that cosine is at most this (GAC); null leaves it as it is."""
    load_balancing: float = Field(0.0, ge=0)
    """Coefficient of the loss that evens out the load of a mixture's experts over each step; 0 leaves it out. The
    figure of that name is the loss itself, 1 where all is even."""
    max_tokens_per_microbatch: int = Field(8192, ge=2)
    """Tokens in one packed forward and backward pass: what bounds memory. Gradients add up over the passes of an
    update, so this changes nothing else."""
    num_minibatches: int = Field(1, ge=1)
    """Parts, of whole groups, that a rollout batch is cut into, with an optimizer step on each."""
    num_epochs: int = Field(1, ge=1)
    """How often each rollout batch is gone through. Every optimizer step is a policy version, so within a batch
    the lag grows by 1 an update, and `pipeline.exact_lag: k` begins at k * num_minibatches * num_epochs."""
    compute: ComputeConfig = ComputeConfig()
    """Precision and memory."""
    off_support_every: int = Field(1, ge=0)
    """With top-p or top-k: rollout batches between computations of the policy's mass off the kept sets, which the
    bound's audit reads. It costs a pass of the output layer over the whole vocabulary without gradient; 0 is
    never."""
    proximal: ProximalConfig = ProximalConfig()
    """When log-probs are recomputed at the version that each token was sampled with."""
    num_threads: int = Field(1, ge=1)
    """Torch threads of each trainer process."""

    @property
    def layout(self) -> Layout:
        return Layout(self.dp, self.tp, self.ep)

    def in_one_process(self) -> Self:
        """The same trainer with the layout 1 x 1, for what reads its checkpoints elsewhere."""
        return self.model_copy(update={"dp": 1, "tp": 1, "ep": 1})

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    @property
    def updates_per_batch(self) -> int:
        return self.num_minibatches * self.num_epochs

    def check_run(self, run: Any) -> None:
        """Episodes fit into a micro-batch, the layout fits the model, and every rank and mini-batch gets some."""
        prompts, longest = run.batch.num_prompts, run.rollout.max_episode_tokens
        if self.num_minibatches > prompts:
            raise ValueError(
                f"trainer.num_minibatches is {self.num_minibatches}, but a batch has the groups of {prompts} prompts, "
                "which stay whole; lower it or raise batch.num_prompts"
            )
        lag, kept = run.pipeline.largest_lag, self.proximal.max_snapshots
        if lag >= kept and (self.proximal.every or needs_proximal(run.objective)):
            raise ValueError(
                f"tokens may lag by {lag} rollout batches, but the weights of only {kept} are kept for proximal "
                f"log-probs; set trainer.proximal.max_snapshots to {lag + 1} or more"
            )
        self.layout.check(json.loads((run.model.directory / "config.json").read_text()))
        self.layout.check_episodes(prompts * run.batch.group_size)
        if self.max_tokens_per_microbatch < longest:
            raise ValueError(
                f"rollout.max_episode_tokens is {longest}, but trainer.max_tokens_per_microbatch is "
                f"{self.max_tokens_per_microbatch}; make them fit"
            )
