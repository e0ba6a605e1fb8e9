"""The torch-native trainer: packed micro-batches, and one or several optimizer steps a rollout batch."""

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from agent_rl.objective.advantage import group_advantages
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.gradient_alignment import GradientAlignment
from agent_rl.objective.loss import LossOutput, Objective, StepContext
from agent_rl.objective.metrics import step_metrics
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.records import FloatArray, Trajectory
from agent_rl.registry import PartBase, PartConfig
from agent_rl.trainer.base import TrainResult
from agent_rl.trainer.batch_reuse import (
    RolloutBatch,
    Update,
    batch_metrics,
    first_use,
    minibatches,
    mismatch_by_update,
    trained_at,
)
from agent_rl.trainer.microbatches import attention_share, plan_microbatches
from agent_rl.trainer.mismatch import active_values, bound_rows, mismatch_rows, reference_rows, step_tokens, with_bound
from agent_rl.trainer.model import ComputeConfig, load_model, weights_of
from agent_rl.trainer.packing import check_lengths, in_order, pack, with_column
from agent_rl.trainer.routing_replay import RoutingTally
from agent_rl.trainer.snapshots import ProximalConfig, Snapshots
from agent_rl.trainer.token_logprobs import TokenLogprobs, token_logprobs

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
                    "vocab.json", "merges.txt", "added_tokens.json")  # fmt: skip


class TorchEngine(PartBase):
    """A Hugging Face causal LM, AdamW and an `Objective`. Fulfils `TrainEngine`."""

    can_replay_routing = True

    class Config(PartConfig):
        type: Literal["torch"] = "torch"
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
        """Torch threads of the trainer process."""

        @property
        def updates_per_batch(self) -> int:
            """Optimizer steps that a rollout batch is used for."""
            return self.num_minibatches * self.num_epochs

    def __init__(self, config: Config, model_path: str, objective: ObjectiveConfig) -> None:
        torch.set_num_threads(config.num_threads)
        self.config, self.source = config, Path(model_path)
        self.objective, self.advantage = Objective(objective), objective.advantage
        self.snapshots = Snapshots(config.proximal.max_snapshots)
        self.alignment = GradientAlignment(config.max_cosine)
        self.frozen: Any = None
        self.model = load_model(model_path, config.compute)
        self.quadratic = attention_share(self.model)
        self.reference = self._frozen_reference(model_path)
        self.optimizer = self._new_optimizer()

    def _frozen_reference(self, model_path: str) -> Any:
        if "ref_logprobs" not in self.objective.needs:
            return None
        return load_model(model_path, self.config.compute).requires_grad_(False)

    def _new_optimizer(self) -> torch.optim.AdamW:
        c = self.config
        parameters = self.model.parameters()
        return torch.optim.AdamW(parameters, lr=c.learning_rate, betas=c.betas, eps=c.eps, weight_decay=c.weight_decay)

    def train(self, trajectories: Sequence[Trajectory], policy_version: int) -> TrainResult:
        """The updates that the batch is used for, each an optimizer step and a policy version from `policy_version` on.

        Advantages, proximal and reference log-probs are those of the whole batch, computed once. A step without a
        sampled token, or with a gradient that is not finite, changes no weight and is counted in the metrics
        `skipped_empty` and `skipped_nonfinite`.
        """
        started = time.monotonic()
        if not trajectories:
            return TrainResult(
                np.empty(0, np.float32), [], [], metrics={"skipped_empty": 1.0, "skipped_nonfinite": 0.0}
            )
        batch = RolloutBatch(
            trajectories,
            advantages=self._advantages(trajectories),
            proximal=self._proximal(trajectories, policy_version),
            reference=self._reference_logprobs(trajectories),
        )
        parts = minibatches([t.group_id for t in trajectories], self.config.num_minibatches, self.config.num_epochs)
        updates = [self._train_once(batch.select(part), part, policy_version + h) for h, part in enumerate(parts)]
        return TrainResult(
            advantages=batch.advantages,
            logprobs=first_use(updates, "logprobs"),
            entropy=first_use(updates, "entropy"),
            ref_logprobs=batch.reference,
            proximal_logprobs=batch.proximal,
            trained_at=trained_at(updates),
            metrics={**batch_metrics(updates), "train_s": time.monotonic() - started},
            mismatch=mismatch_by_update(updates),
        )

    def _train_once(self, chosen: RolloutBatch, indices: list[int], policy_version: int) -> Update:
        """The step's statistic, forward and backward a micro-batch, one AdamW step."""
        if not indices:
            return Update([], policy_version, [], [], {"skipped_empty": 1.0, "skipped_nonfinite": 0.0}, [])
        plan, batches = self._pack(chosen.trajectories, chosen.advantages, chosen.columns(self.objective.needs))
        routing = RoutingTally()
        step, outputs, found = self._accumulate(batches, policy_version, routing)
        logprobs, entropies = [f.logprobs for f in found], [f.entropies for f in found]
        self.objective.end_step(batches, logprobs, step)
        metrics = {"skipped_empty": float(step.empty), "num_microbatches": float(len(batches)), **self._update(step)}
        mismatch: list[dict[str, Any]] = []
        if not step.empty:
            metrics |= step_metrics(batches, outputs, step=step)
            tokens = step_tokens(batches, logprobs, entropies, outputs, policy_version)
            mismatch = mismatch_rows(tokens, active_values(plan, batches, chosen.proximal))
            bound = bound_rows(batches, found)
            mismatch = [*with_bound(mismatch, bound), *reference_rows(batches, outputs, step), *routing.rows()]
            metrics["bound_budget"] = float(bound[-1]["tv"]) + float(bound[-1].get("off_support", 0.0))
            metrics |= routing.metrics()
            metrics["mismatch_mean_abs"] = float(mismatch[0]["mean_abs_d"])
            metrics["entropy"] = float(mismatch[0]["entropy"])
        own, entropy = in_order(plan, batches, logprobs), in_order(plan, batches, entropies)
        return Update(indices, policy_version, own, entropy, metrics, mismatch)

    @property
    def _needs_proximal(self) -> bool:
        return "proximal_logprobs" in self.objective.needs

    @torch.no_grad()
    def _proximal(self, trajectories: Sequence[Trajectory], policy_version: int) -> list[FloatArray | None] | None:
        """Log-probs at the version each token was sampled with; None for trajectories left out, or for all.

        One forward pass a version and micro-batch that holds tokens of it.
        """
        every, fraction = self.config.proximal.every, self.config.proximal.fraction
        if not (every or self._needs_proximal):
            return None
        self.snapshots.keep(policy_version, self.model)
        if self._needs_proximal:
            fraction = 1.0
        elif self._batch_number(policy_version) % every:
            return None
        chosen = [
            i for i, t in enumerate(trajectories) if int((t.episode_id + 1) * fraction) > int(t.episode_id * fraction)
        ]
        found: list[FloatArray | None] = [None] * len(trajectories)
        plan, batches = self._pack([trajectories[i] for i in chosen], np.zeros(len(chosen), np.float32))
        for index, values in zip(chosen, in_order(plan, batches, self._at_own_versions(batches)), strict=True):
            found[index] = values
        return found

    def _at_own_versions(self, batches: list[TokenBatch]) -> list[Tensor]:
        """Log-probs [T] of each micro-batch, every token's at its own policy version."""
        self.frozen = self.frozen or load_model(str(self.source), self.config.compute).requires_grad_(False)
        found = [torch.zeros(len(batch)) for batch in batches]
        for version in sorted({v for b in batches for v in b.policy_versions[b.loss_mask].tolist()}):
            self.snapshots.load_into(self.frozen, version)
            for values, batch in zip(found, batches, strict=True):
                if bool((own := batch.policy_versions == version).any()):
                    values[own] = token_logprobs(self.frozen, batch)[0][own]
        return found

    def _advantages(self, trajectories: Sequence[Trajectory]) -> FloatArray:
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)
        outcomes = torch.tensor([t.outcome for t in trajectories], dtype=torch.float32)
        groups = torch.tensor([t.group_id for t in trajectories])
        found: FloatArray = group_advantages(rewards, groups, self.advantage, outcomes).numpy()
        return found

    def _pack(
        self,
        trajectories: Sequence[Trajectory],
        advantages: FloatArray,
        columns: Mapping[str, Sequence[FloatArray]] | None = None,
    ) -> tuple[list[list[int]], list[TokenBatch]]:
        """(which trajectory went into which micro-batch, the micro-batches with further `columns`)."""
        limit = self.config.max_tokens_per_microbatch
        check_lengths(trajectories, limit)
        planned = plan_microbatches([len(t) for t in trajectories], limit, quadratic=self.quadratic)
        plan = [parts[0] for parts in planned]
        batches = [pack([trajectories[i] for i in part], advantages[part].tolist()) for part in plan]
        for name, values in (columns or {}).items():
            batches = [with_column(b, part, name, values) for b, part in zip(batches, plan, strict=True)]
        return plan, batches

    @torch.no_grad()
    def _reference_logprobs(self, trajectories: Sequence[Trajectory]) -> list[FloatArray] | None:
        """Log-probs of the initial policy, where the objective reads them."""
        if self.reference is None:
            return None
        plan, batches = self._pack(trajectories, np.zeros(len(trajectories), np.float32))
        return in_order(plan, batches, [token_logprobs(self.reference, batch)[0] for batch in batches])

    def _batch_number(self, policy_version: int) -> int:
        """Which rollout batch of the run a version is trained on."""
        return policy_version // self.config.updates_per_batch

    def _accumulate(
        self, batches: list[TokenBatch], policy_version: int, routing: RoutingTally
    ) -> tuple[StepContext, list[LossOutput], list[TokenLogprobs]]:
        """Gradients of the step's loss, with what each micro-batch's loss was made of.

        The step's statistic needs every log-prob before the first loss. With one micro-batch the forward
        pass that is trained gives them; with more, a pass without gradients goes first.
        """
        self.optimizer.zero_grad(set_to_none=True)
        step, number = None, self._batch_number(policy_version)
        off_support = self.config.off_support_every > 0 and number % self.config.off_support_every == 0
        if len(batches) > 1:
            step = self.objective.begin_step(batches, self._no_grad_pass(batches), step=number)
        outputs, found = [], []
        for batch in batches:
            current = token_logprobs(self.model, batch, off_support)
            routing.add(self.model, batch.turn_ids)
            constant = current._replace(logprobs=current.logprobs.detach())
            step = step or self.objective.begin_step(batches, [constant.logprobs], step=number)
            found.append(constant)
            if not step.empty:
                output = self.objective.loss(current.logprobs, batch, step)
                output.loss.backward()  # type: ignore[no-untyped-call]
                outputs.append(output)
        assert step is not None
        return step, outputs, found

    def _no_grad_pass(self, batches: list[TokenBatch]) -> list[Tensor] | None:
        if not self.objective.needs_step_pass:
            return None
        with torch.no_grad():
            return [token_logprobs(self.model, batch)[0] for batch in batches]

    def _update(self, step: StepContext) -> dict[str, float]:
        if step.empty:
            return {"skipped_nonfinite": 0.0}
        metrics = {}
        if self.config.gradient_alignment or self.config.max_cosine is not None:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            metrics["gradient_cosine"] = self.alignment.apply(gradients)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        return {**metrics, "grad_norm": float(norm), "skipped_nonfinite": float(not finite)}

    @torch.no_grad()
    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        """Log-prob of every sampled token, float32 [L] a trajectory, NaN elsewhere, replayed as sampled."""
        plan, batches = self._pack(trajectories, np.zeros(len(trajectories), np.float32))
        return in_order(plan, batches, [token_logprobs(self.model, batch)[0] for batch in batches])

    def publish(self, path: Path) -> None:
        """Write the weights under Hugging Face names; whole or not at all."""
        temporary = path.with_suffix(".tmp")
        save_file(weights_of(self.model), temporary)
        temporary.rename(path)

    def save(self, directory: Path) -> None:
        """A model directory that anything can load, with optimizer, objective, last gradient and snapshots."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(directory)
        for name in _TOKENIZER_FILES:
            if (self.source / name).is_file():
                shutil.copyfile(self.source / name, directory / name)
        torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")
        torch.save(self.objective.state_dict(), directory / "objective.pt")
        torch.save(self.alignment.state_dict(), directory / "alignment.pt")
        self.snapshots.save(directory / "snapshots")

    def load(self, directory: Path) -> None:
        """Weights, optimizer, objective and snapshots of a checkpoint; the reference stays the initial policy."""
        self.model = load_model(str(directory), self.config.compute)
        self.optimizer = self._new_optimizer()
        self.optimizer.load_state_dict(torch.load(directory / "optimizer.pt", weights_only=True))
        self.objective.load_state_dict(torch.load(directory / "objective.pt", weights_only=True))
        self.alignment.load_state_dict(torch.load(directory / "alignment.pt", weights_only=True))
        self.snapshots.load(directory / "snapshots")
