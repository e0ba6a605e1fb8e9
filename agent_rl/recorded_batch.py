"""The recorded batch of a run's step, and what an objective makes of it at the weights of that step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_rl import facts
from agent_rl.config import RunConfig
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.loss import LossOutput, Objective
from agent_rl.objective.metrics import step_metrics
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.pipeline.run_directory import ROLLOUT_TABLE, TRAINING_TABLE, list_checkpoints
from agent_rl.pipeline.state import RunState
from agent_rl.records import Trajectory
from agent_rl.trainer.batch_reuse import advantages_of
from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.trainer.microbatches import attention_share, plan_microbatches
from agent_rl.trainer.packing import check_lengths, pack
from agent_rl.trainer.token_logprobs import token_logprobs


@dataclass(frozen=True, eq=False)
class Measured:
    """One objective on the batch. gradient: float [P], flat; gate and clipped: bool [A], of the sampled tokens."""

    loss: float
    gradient: Tensor
    metrics: dict[str, float]
    gate: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class Candidate:
    """What is evaluated: an objective, and whether the policy chooses experts as recorded or by itself."""

    objective: ObjectiveConfig
    routing_replay: bool


@dataclass(eq=False)
class Policy:
    """The policy under one way of routing.

    `logprobs` [T] of each micro-batch; `off_support` [A] of its sampled tokens, empty where nothing was cut off;
    the graph of a single micro-batch; and the reference policy's log-probs of each trajectory, if the KL reads them.
    """

    trajectories: list[Trajectory]
    logprobs: list[Tensor]
    off_support: list[Tensor]
    graph: Tensor | None
    reference: list[np.ndarray] | None


class RecordedBatch:
    """The batch that a run trained, or would have trained, at `step`, and the policy of the checkpoint there.

    The log-probs are computed once a way of routing, packed as the trainer packs; each objective's gradient then
    goes back through the model. With several micro-batches their graphs are built again for each, so that memory
    stays that of one.
    """

    def __init__(self, run: Path, step: int, config: RunConfig) -> None:
        if not isinstance(config.trainer, TorchEngine.Config):
            raise ValueError(f"replay works with trainer torch, and {run} has trainer {config.trainer.type}")
        checkpoint = _checkpoint(run, step)
        self.step, self.config, self.checkpoint = step, config, checkpoint
        self.trajectories, self.proximal = _read_batch(run, step, checkpoint)
        self.recorded_routing = any(t.routed_experts is not None for t in self.trajectories)
        limit = config.trainer.max_tokens_per_microbatch
        check_lengths(self.trajectories, limit)
        self.model = _model(config, checkpoint)
        lengths = [len(t) for t in self.trajectories]
        planned = plan_microbatches(lengths, limit, quadratic=attention_share(self.model))
        self.plan = [parts[0] for parts in planned]
        sampled = torch.cat([torch.from_numpy(self.trajectories[i].loss_mask.copy()) for p in self.plan for i in p])
        if not bool(sampled.any()):
            raise ValueError(f"batch {step} of {run} has no sampled token; choose another step")
        turns = np.concatenate([self.trajectories[i].turn_ids for part in self.plan for i in part])
        self.turn_ids = torch.from_numpy(turns).long()[sampled]
        self._policies: dict[bool, Policy] = {}

    def missing(self, candidate: Candidate) -> str | None:
        """What `candidate` reads and the run has not recorded."""
        if candidate.routing_replay and not self.recorded_routing:
            return "replays routing, and the run recorded none: it was made without routing_replay"
        if "proximal_logprobs" not in Objective(candidate.objective).needs:
            return None
        if self.proximal is None:
            return f"needs proximal_logprobs, which the training facts of step {self.step} do not hold for all"
        if self.recorded_routing and not candidate.routing_replay:
            return "needs proximal_logprobs of the model's own routing, and the recorded ones are with replay"
        return None

    def measure(self, candidate: Candidate) -> Measured:
        """The candidate's loss, gradient and figures; a clip that is the run's own has its state."""
        policy, config = self.policy(candidate.routing_replay), candidate.objective
        batches = self._batches(policy, advantages_of(self.trajectories, config.advantage))
        objective = Objective(config)
        if config.clip == self.config.objective.clip:
            objective.load_state_dict(torch.load(self.checkpoint / "objective.pt", weights_only=True))
        leaves = [values.clone().requires_grad_() for values in policy.logprobs]
        step = objective.begin_step(batches, policy.logprobs, step=self.step)
        outputs = [objective.loss(values, batch, step) for values, batch in zip(leaves, batches, strict=True)]
        gradients = torch.autograd.grad(sum((o.loss for o in outputs), torch.zeros(())), leaves)
        metrics = step_metrics(batches, outputs, step=step)
        gradient = self._through_the_model(batches, gradients, policy.graph)
        gate, clipped = (_active(batches, outputs, name) for name in ("gate", "clipped"))
        return Measured(metrics["loss"], gradient, metrics, gate, clipped)

    def policy(self, routing_replay: bool) -> Policy:
        """Computed when first asked for."""
        if routing_replay not in self._policies:
            own = self.trajectories if routing_replay else [replace(t, routed_experts=None) for t in self.trajectories]
            policy = Policy(own, [], [], None, self._reference_logprobs(own))
            batches = self._batches(policy, np.zeros(len(own), np.float32))
            with torch.set_grad_enabled(len(batches) == 1):
                found = [token_logprobs(self.model, batch, off_support=True) for batch in batches]
            policy.graph = found[0].logprobs if len(batches) == 1 else None
            policy.logprobs = [f.logprobs.detach() for f in found]
            policy.off_support = [
                f.off_support[b.active.index] for f, b in zip(found, batches, strict=True) if f.off_support is not None
            ]
            self._policies[routing_replay] = policy
        return self._policies[routing_replay]

    def _through_the_model(
        self, batches: list[TokenBatch], gradients: Sequence[Tensor], graph: Tensor | None
    ) -> Tensor:
        """The gradient of the parameters, [P], from that of the log-probs of each micro-batch."""
        parameters = list(self.model.parameters())
        total = torch.zeros(sum(p.numel() for p in parameters))
        for batch, gradient in zip(batches, gradients, strict=True):
            logprobs = token_logprobs(self.model, batch)[0] if graph is None else graph
            parts = torch.autograd.grad(
                logprobs, parameters, gradient, retain_graph=graph is not None, materialize_grads=True
            )
            total += torch.cat([part.flatten() for part in parts]).cpu()
        return total

    def _batches(self, policy: Policy, advantages: np.ndarray) -> list[TokenBatch]:
        batches = [pack([policy.trajectories[i] for i in part], advantages[part].tolist()) for part in self.plan]
        for name, columns in (("proximal_logprobs", self.proximal), ("ref_logprobs", policy.reference)):
            if columns is not None:
                parts = [np.concatenate([columns[i] for i in part]) for part in self.plan]
                batches = [
                    replace(batch, **{name: torch.from_numpy(part)}) for batch, part in zip(batches, parts, strict=True)
                ]
        return batches

    def _reference_logprobs(self, trajectories: list[Trajectory]) -> list[np.ndarray] | None:
        """Those of the policy that the run began with, if its KL reads them."""
        if not self.config.objective.kl.coefficient:
            return None
        engine = TorchEngine(self.config.trainer.in_one_process(), str(self.config.model.directory), ObjectiveConfig())
        return list(engine.logprobs(trajectories))


def _model(config: RunConfig, checkpoint: Path) -> Any:
    """The policy as the trainer holds it."""
    return TorchEngine(config.trainer.in_one_process(), str(checkpoint), ObjectiveConfig()).model


def _checkpoint(run: Path, step: int) -> Path:
    found = {step_of(path): path for path in list_checkpoints(run)}
    if step not in found:
        known = f"there are those of steps {', '.join(map(str, found))}" if found else "there is none"
        raise ValueError(f"{run} has no checkpoint of step {step}; {known}")
    return found[step]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _read_batch(run: Path, step: int, checkpoint: Path) -> tuple[list[Trajectory], list[np.ndarray] | None]:
    """(trajectories, proximal log-probs if recorded for all): what step `step` trained, in its order, or has queued."""
    rows = facts.read_part(run / ROLLOUT_TABLE, step)
    training = [row for row in facts.read_part(run / TRAINING_TABLE, step) if row["fate"] == "trained"]
    queue = RunState.load(checkpoint).queue
    if not rows or (not training and step not in queue):
        raise ValueError(f"{run} has no recorded batch for step {step}: it was neither trained nor queued there")
    if not training:
        found = [facts.trajectory(row) for row in rows if row["group_id"] in queue[step]]
        return [trajectory for trajectory in found if trajectory.mask_reason is None], None
    training.sort(key=lambda row: row["order"])
    recorded = {row["episode_id"]: row for row in rows}
    trajectories = [facts.trajectory(recorded[row["episode_id"]]) for row in training]
    columns = [row.get("proximal_logprobs") for row in training]
    if any(column is None for column in columns):
        return trajectories, None
    return trajectories, [np.asarray(column, np.float32) for column in columns]


def _active(batches: Sequence[TokenBatch], outputs: Sequence[LossOutput], name: str) -> Tensor:
    return torch.cat([getattr(o, name)[b.active.index] for o, b in zip(outputs, batches, strict=True)])
