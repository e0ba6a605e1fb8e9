"""The torch-native trainer: packed micro-batches over one process or a mesh of ranks, one or several optimizer steps
a rollout batch."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.gradient_alignment import GradientAlignment
from agent_rl.objective.loss import LossOutput, Objective, StepContext
from agent_rl.objective.metrics import step_metrics
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.records import FloatArray, Trajectory
from agent_rl.registry import PartBase
from agent_rl.trainer.base import TrainResult
from agent_rl.trainer.batch_reuse import (
    RolloutBatch,
    Update,
    advantages_of,
    batch_metrics,
    first_use,
    minibatches,
    mismatch_by_update,
    trained_at,
)
from agent_rl.trainer.checkpoint import CheckpointWriter, check_architecture, load_optimizer, staged
from agent_rl.trainer.config import TorchConfig
from agent_rl.trainer.gradients import align, by_mesh, clip_gradients
from agent_rl.trainer.load_balancing import LoadBalancing
from agent_rl.trainer.microbatches import attention_share, plan_microbatches
from agent_rl.trainer.mismatch import StepShare, active_values, bound_tokens, reference_rows, rows_of_all, step_tokens
from agent_rl.trainer.model import device_of, load_model, weights_of
from agent_rl.trainer.packing import by_index, check_lengths, pack, with_column
from agent_rl.trainer.ranks import Ranks
from agent_rl.trainer.routing_replay import RoutingTally
from agent_rl.trainer.snapshots import Snapshots
from agent_rl.trainer.token_logprobs import TokenLogprobs, token_logprobs
from agent_rl.trainer.weight_file import write_weights


class TorchEngine(PartBase):
    """A Hugging Face causal LM, AdamW and an `Objective`. Fulfils `TrainEngine`."""

    can_replay_routing = True

    Config = TorchConfig

    def __init__(self, config: TorchConfig, model_path: str, objective: ObjectiveConfig) -> None:
        torch.set_num_threads(config.num_threads)
        self.config, self.source = config, Path(model_path)
        config.layout.check(json.loads((self.source / "config.json").read_text()))
        self.ranks = Ranks(config.layout, device_of(config.compute))
        self.checkpoints = CheckpointWriter(self.ranks)
        self.objective, self.advantage = Objective(objective), objective.advantage
        self.snapshots = Snapshots(config.proximal.max_snapshots)
        self.alignment = GradientAlignment(config.max_cosine)
        self.frozen: Any = None
        self.model = load_model(model_path, config.compute, self.ranks)
        self.quadratic = attention_share(self.model)
        self.reference = self._frozen_reference(model_path)
        self.optimizer = self._new_optimizer()

    def _frozen_reference(self, model_path: str) -> Any:
        if "ref_logprobs" not in self.objective.needs:
            return None
        return load_model(model_path, self.config.compute, self.ranks).requires_grad_(False)

    def _new_optimizer(self) -> torch.optim.AdamW:
        c = self.config
        groups = [{"params": group} for group in by_mesh(list(self.model.parameters()))]
        return torch.optim.AdamW(groups, lr=c.learning_rate, betas=c.betas, eps=c.eps, weight_decay=c.weight_decay)

    def train(self, trajectories: Sequence[Trajectory], policy_version: int) -> TrainResult:
        """The updates that the batch is used for, each an optimizer step and a policy version from `policy_version` on.

        Advantages, proximal and reference log-probs are those of the whole batch, computed once. A step without a
        sampled token, or with a gradient that is not finite, changes no weight and is counted in the metrics
        `skipped_empty` and `skipped_nonfinite`. Every rank is given all trajectories, takes its share of each pass, and
        returns the result of all.
        """
        started = time.monotonic()
        if self.config.proximal.every or self._needs_proximal:
            self.snapshots.keep(policy_version, self.model)  # even if empty: later batches may have this version
        if not trajectories:
            return TrainResult(
                np.empty(0, np.float32), [], [], metrics={"skipped_empty": 1.0, "skipped_nonfinite": 0.0}
            )
        batch = RolloutBatch(
            trajectories,
            advantages=advantages_of(trajectories, self.advantage),
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
        """One optimizer step on `chosen`: the statistic, forward and backward of each micro-batch, then AdamW."""
        if not indices:
            return Update([], policy_version, [], [], {"skipped_empty": 1.0, "skipped_nonfinite": 0.0}, [])
        plan, batches = self._pack(chosen.trajectories, chosen.advantages, chosen.columns(self.objective.needs))
        routing = RoutingTally()
        balance = LoadBalancing(self.model, self.config.load_balancing, self.ranks.reduce)
        step, outputs, passes = self._accumulate(batches, policy_version, routing, balance)
        logprobs, entropies = [p.logprobs for p in passes], [p.entropies for p in passes]
        self.objective.end_step(batches, logprobs, step, self.ranks.reduce)
        metrics = {"skipped_empty": float(step.empty), "num_microbatches": float(len(batches)), **self._update(step)}
        mismatch: list[dict[str, Any]] = []
        if not step.empty:
            tokens = step_tokens(batches, logprobs, entropies, outputs, policy_version)
            at_proximal = active_values(plan, batches, chosen.proximal)
            mismatch = rows_of_all(self.ranks.gather(StepShare(tokens, bound_tokens(batches, passes), at_proximal)))
            metrics |= step_metrics(batches, outputs, self.ranks.reduce, step) | self._mismatch_metrics(mismatch[0])
            routing.join(self.ranks.gather(routing.counts))
            mismatch += [*reference_rows(batches, outputs, step, self.ranks.reduce), *routing.rows()]
            metrics |= routing.metrics() | balance.metrics()
        own, entropy = self._in_order(plan, batches, logprobs), self._in_order(plan, batches, entropies)
        return Update(indices, policy_version, own, entropy, metrics, mismatch)

    def _mismatch_metrics(self, whole: dict[str, Any]) -> dict[str, float]:
        """Metrics from `whole`, the mismatch row over all tokens; `bound_budget` only where all of it is known."""
        metrics = {"mismatch_mean_abs": float(whole["mean_abs_d"]), "entropy": float(whole["entropy"])}
        cut = whole["kept_size"] > 0  # NaN with full support, which has no mass off it
        if "off_support" in whole or not (cut and self.config.off_support_every):
            metrics["bound_budget"] = float(whole.get("tv", 0.0)) + float(whole.get("off_support", 0.0))
        return metrics

    def _in_order(self, plan: list[list[int]], batches: list[TokenBatch], values: list[Tensor]) -> list[FloatArray]:
        """Per-token values of all ranks' micro-batches as one array a trajectory, in the trajectories' own order."""
        shares = self.ranks.gather(by_index(plan, batches, values))
        arrays = {index: array for share in shares for index, array in share.items()}
        return [arrays[i] for i in range(len(arrays))]

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
        if self._needs_proximal:
            fraction = 1.0
        elif self._batch_number(policy_version) % every:
            return None
        chosen = [
            i for i, t in enumerate(trajectories) if int((t.episode_id + 1) * fraction) > int(t.episode_id * fraction)
        ]
        arrays: list[FloatArray | None] = [None] * len(trajectories)
        plan, batches = self._pack([trajectories[i] for i in chosen], np.zeros(len(chosen), np.float32))
        if self.frozen is None:
            self.frozen = load_model(str(self.source), self.config.compute, self.ranks).requires_grad_(False)
        logprobs = self.snapshots.logprobs(self.frozen, batches, self.ranks)
        for index, values in zip(chosen, self._in_order(plan, batches, logprobs), strict=True):
            arrays[index] = values
        return arrays

    def _pack(
        self,
        trajectories: Sequence[Trajectory],
        advantages: FloatArray,
        columns: Mapping[str, Sequence[FloatArray]] | None = None,
    ) -> tuple[list[list[int]], list[TokenBatch]]:
        """(which trajectory went into which micro-batch, the micro-batches with further `columns`) of this rank.

        A rank that has no trajectory left for a micro-batch takes part with a dummy.
        """
        limit = self.config.max_tokens_per_microbatch
        check_lengths(trajectories, limit)
        planned = plan_microbatches([len(t) for t in trajectories], limit, self.config.dp, self.quadratic)
        plan = [parts[self.ranks.dp_rank] for parts in planned]
        with self.ranks.together():
            batches = [pack([trajectories[i] for i in part], advantages[part].tolist()) for part in plan]
            for name, values in (columns or {}).items():
                batches = [with_column(b, part, name, values) for b, part in zip(batches, plan, strict=True)]
        return plan, batches

    def _reference_logprobs(self, trajectories: Sequence[Trajectory]) -> list[FloatArray] | None:
        """Log-probs of the initial policy, where the objective reads them."""
        return None if self.reference is None else self._logprobs_of(self.reference, trajectories)

    @torch.no_grad()
    def _logprobs_of(self, model: Any, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        plan, batches = self._pack(trajectories, np.zeros(len(trajectories), np.float32))
        return self._in_order(plan, batches, [token_logprobs(model, batch).logprobs for batch in batches])

    def _batch_number(self, policy_version: int) -> int:
        """Which rollout batch of the run a version is trained on."""
        return policy_version // self.config.updates_per_batch

    def _accumulate(
        self, batches: list[TokenBatch], policy_version: int, routing: RoutingTally, balance: LoadBalancing
    ) -> tuple[StepContext, list[LossOutput], list[TokenLogprobs]]:
        """Gradients of the step's loss, with what each micro-batch's loss was made of.

        The step's statistic needs every log-prob before the first loss. With one micro-batch the forward
        pass that is trained gives them; with more, a pass without gradients goes first.
        """
        self.optimizer.zero_grad(set_to_none=True)
        number, one_pass = self._batch_number(policy_version), len(batches) == 1
        off_support = self.config.off_support_every > 0 and number % self.config.off_support_every == 0
        step = None
        if not one_pass:
            step = self.objective.begin_step(batches, self._no_grad_pass(batches, balance), self.ranks.reduce, number)
        outputs, passes = [], []
        for batch in batches:
            current = token_logprobs(self.model, batch, off_support)
            routing.add(self.model, batch.turn_ids)
            constant = current._replace(logprobs=current.logprobs.detach())
            passes.append(constant)
            if one_pass:
                balance.count(self.model, batch)
                step = self.objective.begin_step(batches, [constant.logprobs], self.ranks.reduce, number)
            assert step is not None
            if not step.empty:
                output = self.objective.loss(current.logprobs, batch, step)
                (output.loss + balance.loss(self.model, batch)).backward()  # type: ignore[no-untyped-call]
                outputs.append(output)
        assert step is not None
        return step, outputs, passes

    @torch.no_grad()
    def _no_grad_pass(self, batches: list[TokenBatch], balance: LoadBalancing) -> list[Tensor] | None:
        if not (self.objective.needs_step_pass or balance.is_on):
            return None
        logprobs = []
        for batch in batches:
            logprobs.append(token_logprobs(self.model, batch).logprobs)
            balance.count(self.model, batch)
        return logprobs

    def _update(self, step: StepContext) -> dict[str, float]:
        if step.empty:
            return {"skipped_nonfinite": 0.0}
        metrics = {}
        parameters = list(self.model.parameters())
        if self.config.gradient_alignment or self.config.max_cosine is not None:
            metrics["gradient_cosine"] = align(parameters, self.alignment, self.ranks)
        norm = clip_gradients(parameters, self.config.max_grad_norm, self.ranks)
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
        return {**metrics, "grad_norm": norm, "skipped_nonfinite": float(not finite)}

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        """Log-prob of every sampled token, float32 [L] a trajectory, NaN elsewhere, replayed as sampled."""
        return self._logprobs_of(self.model, trajectories)

    def publish(self, path: Path) -> None:
        """Write the weights under the names of Hugging Face's files, each rank its shards; whole or not at all."""
        write_weights(path, weights_of(self.model), self.ranks, by_expert=True)

    def save(self, directory: Path) -> None:
        """A model directory that anything can load, with optimizer, objective, last gradient and snapshots."""
        self.begin_save(directory)
        self.finish_save()

    def begin_save(self, directory: Path) -> None:
        """Copy what `save` writes and start writing it; training can go on. Waits for an earlier one."""
        self.finish_save()
        state = self.objective.state_dict()
        copied = staged(self.model, self.optimizer, self.alignment, self.snapshots, state)
        self.checkpoints.begin(directory, copied, self.model, self.source)

    def finish_save(self) -> None:
        """Wait until what `begin_save` began is written. Raises what went wrong with it."""
        self.checkpoints.finish()

    def load(self, directory: Path) -> None:
        """Weights, optimizer, objective and snapshots of a checkpoint, whatever layout wrote it; the reference stays
        the initial policy. Raises `ValueError` if it is of another architecture."""
        check_architecture(directory, self.model)
        self.model = load_model(str(directory), self.config.compute, self.ranks)
        self.optimizer = self._new_optimizer()
        load_optimizer(directory, self.model, self.optimizer, self.alignment, self.ranks)
        self.objective.load_state_dict(torch.load(directory / "objective.pt", weights_only=True))
        self.snapshots.load(directory / "snapshots", self.model)
