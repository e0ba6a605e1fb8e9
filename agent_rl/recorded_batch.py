"""The recorded batch of a run's step, and what an objective makes of it at the weights of that step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agent_rl import facts
from agent_rl.config import RunConfig
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.loss import LossOutput, Objective, needs_proximal
from agent_rl.objective.metrics import step_metrics
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.pipeline.run_directory import checkpoint_step, list_checkpoints
from agent_rl.pipeline.state import RunState
from agent_rl.records import Trajectory
from agent_rl.trainer.batch_reuse import advantages_of
from agent_rl.trainer.config import TorchConfig
from agent_rl.trainer.microbatches import attention_share, plan_microbatches
from agent_rl.trainer.model import load_model
from agent_rl.trainer.packing import by_index, check_lengths, pack, with_column
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

    logprobs: [T] a micro-batch. off_support: the mass off the kept sets at the sampled tokens, [A] a micro-batch; empty
    where nothing was cut off. graph: the log-probs with their graph, for a single micro-batch only. reference: the
    reference policy's log-probs, [L] a trajectory, if the KL reads them.
    """

    trajectories: list[Trajectory]
    logprobs: list[Tensor]
    off_support: list[Tensor]
    graph: Tensor | None
    reference: list[np.ndarray] | None


class RecordedBatch:
    """The batch that a run trained, or would have trained, at `step`, and the policy of the checkpoint there.

    The log-probs are computed once for each way of routing, packed as the trainer packs them; each objective's gradient
    then goes back through the model. With several micro-batches the graph of each is built again for each objective, so
    that memory holds one graph at a time. Raises `ValueError` if the batch or its checkpoint is not there.
    """

    def __init__(self, run: Path, step: int, config: RunConfig) -> None:
        if not isinstance(config.trainer, TorchConfig):
            raise ValueError(f"replay works with trainer torch, and {run} has trainer {config.trainer.type}")
        torch.set_num_threads(config.trainer.num_threads)
        checkpoint = _checkpoint(run, step)
        self.step, self.config, self.checkpoint = step, config, checkpoint
        self.trajectories, self.proximal = _read_batch(run, step, checkpoint)
        self.recorded_routing = any(t.routed_experts is not None for t in self.trajectories)
        limit = config.trainer.max_tokens_per_microbatch
        check_lengths(self.trajectories, limit)
        self.model = load_model(str(checkpoint), config.trainer.compute)
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
        if not needs_proximal(candidate.objective):
            return None
        if self.proximal is None:
            return f"needs proximal_logprobs, which the training facts of step {self.step} do not hold for all"
        if self.recorded_routing and not candidate.routing_replay:
            return "needs proximal_logprobs of the model's own routing, and the recorded ones are with replay"
        return None

    def measure(self, candidate: Candidate) -> Measured:
        """The candidate's loss, gradient and figures. The run's own clip starts from the state in the checkpoint."""
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
        """The policy under one way of routing, computed when first asked for."""
        if routing_replay not in self._policies:
            own = self.trajectories if routing_replay else [replace(t, routed_experts=None) for t in self.trajectories]
            policy = Policy(own, [], [], None, self._reference_logprobs(own))
            batches = self.packed(own)
            with torch.set_grad_enabled(len(batches) == 1):
                passes = [token_logprobs(self.model, batch, off_support=True) for batch in batches]
            policy.graph = passes[0].logprobs if len(batches) == 1 else None
            policy.logprobs = [p.logprobs.detach() for p in passes]
            policy.off_support = [
                p.off_support[b.active.index] for p, b in zip(passes, batches, strict=True) if p.off_support is not None
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

    def packed(self, trajectories: list[Trajectory], advantages: np.ndarray | None = None) -> list[TokenBatch]:
        """The micro-batches of the batch's `trajectories`; `advantages` [B], 0 if they are not given."""
        given = np.zeros(len(trajectories), np.float32) if advantages is None else advantages
        return [pack([trajectories[i] for i in part], given[part].tolist()) for part in self.plan]

    def _batches(self, policy: Policy, advantages: np.ndarray) -> list[TokenBatch]:
        """With the log-probs that objectives read besides the policy's own."""
        batches = self.packed(policy.trajectories, advantages)
        for name, values in (("proximal_logprobs", self.proximal), ("ref_logprobs", policy.reference)):
            if values is not None:
                batches = [with_column(b, part, name, values) for b, part in zip(batches, self.plan, strict=True)]
        return batches

    @torch.no_grad()
    def _reference_logprobs(self, trajectories: list[Trajectory]) -> list[np.ndarray] | None:
        """Those of the policy that the run began with, if its KL reads them."""
        if not self.config.objective.kl.coefficient:
            return None
        reference = load_model(str(self.config.model.directory), self.config.trainer.compute)
        batches = self.packed(trajectories)
        logprobs = [token_logprobs(reference, batch).logprobs for batch in batches]
        arrays = by_index(self.plan, batches, logprobs)
        return [arrays[i] for i in range(len(trajectories))]


def _checkpoint(run: Path, step: int) -> Path:
    by_step = {checkpoint_step(path): path for path in list_checkpoints(run)}
    if step not in by_step:
        known = f"there are those of steps {', '.join(map(str, by_step))}" if by_step else "there is none"
        raise ValueError(f"{run} has no checkpoint of step {step}; {known}")
    return by_step[step]


def _read_batch(run: Path, step: int, checkpoint: Path) -> tuple[list[Trajectory], list[np.ndarray] | None]:
    """(trajectories, proximal log-probs if recorded for all): what step `step` trained, in its order, or has queued."""
    rows = facts.read_part(run / facts.ROLLOUT_TABLE, step)
    training = [row for row in facts.read_part(run / facts.TRAINING_TABLE, step) if row["fate"] == "trained"]
    queue = RunState.load(checkpoint).queue
    if not rows or (not training and step not in queue):
        raise ValueError(f"{run} has no recorded batch for step {step}: it was neither trained nor queued there")
    if not training:
        return facts.unmasked_trajectories(row for row in rows if row["group_id"] in queue[step]), None
    training.sort(key=lambda row: row["order"])
    recorded = {row["episode_id"]: row for row in rows}
    trajectories = [facts.trajectory(recorded[row["episode_id"]]) for row in training]
    columns = [row.get("proximal_logprobs") for row in training]
    if any(column is None for column in columns):
        return trajectories, None
    return trajectories, [np.asarray(column, np.float32) for column in columns]


def _active(batches: Sequence[TokenBatch], outputs: Sequence[LossOutput], name: str) -> Tensor:
    return torch.cat([getattr(o, name)[b.active.index] for o, b in zip(outputs, batches, strict=True)])
