"""Offline replay: one recorded batch through many objectives, side by side, from one policy.

Of a run: the batch of a step, from the checkpoint that the step trained from, with the gradient of the model's
parameters. Of a Parquet file, which another framework may have written: the gradient of the log-probs, since a
file has no model. Nothing is trained and nothing is written to the run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from agent_rl import facts
from agent_rl.config import RunConfig, load, model_directory
from agent_rl.dump import Dump
from agent_rl.objective.advantage import group_advantages
from agent_rl.objective.config import AdvantageConfig, ObjectiveConfig
from agent_rl.objective.errors import ObjectiveError
from agent_rl.objective.loss import LossOutput, Objective
from agent_rl.objective.methods import lay_over, method_names
from agent_rl.objective.metrics import step_metrics
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.pipeline.run_directory import ROLLOUT_TABLE, TRAINING_TABLE, list_checkpoints
from agent_rl.pipeline.state import RunState
from agent_rl.records import Trajectory
from agent_rl.settings import check
from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.trainer.packing import check_lengths, pack, split
from agent_rl.trainer.token_logprobs import token_logprobs

Methods = str | Mapping[str, ObjectiveConfig]
"""`all`, names with commas between, or objectives by a name of one's own."""

REFERENCE = "grpo"
"""The method whose gradient the others are compared with; always evaluated."""
OWN = "own"
"""What the run itself maximised, beside the methods."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One objective on the batch. gradient: float [P], flat; gate and clipped: bool [A], of the sampled tokens."""

    loss: float
    gradient: Tensor
    metrics: dict[str, float]
    gate: Tensor
    clipped: Tensor


@dataclass(frozen=True, eq=False)
class Replay:
    """What every objective made of one batch.

    table: one row a method, GRPO first: method, loss, gradient_norm, cosine (of the gradient to GRPO's; NaN where
    one of them is 0), gate_rate, dropped_fraction, clip_fraction, eps_low, eps_high (infinite without a clip),
    gate_rate_turn_<k> and clip_fraction_turn_<k>, and `skipped`: why a method could not be evaluated, with every
    number null, else null. notes: what to know of a method's row. gradient_of: what the gradient is taken to.
    """

    table: pl.DataFrame
    gradient_of: str
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def skipped(self) -> dict[str, str]:
        """Why, by method."""
        return dict(self.table.filter(pl.col("skipped").is_not_null()).select("method", "skipped").iter_rows())

    def overall(self) -> pl.DataFrame:
        """The evaluated methods, without the columns by turn."""
        return self._evaluated().select(name for name in self.table.columns if "_turn_" not in name).drop("skipped")

    def by_turn(self, figure: str) -> pl.DataFrame:
        """`gate_rate` or `clip_fraction` of the evaluated methods: columns method, all, and one a turn."""
        prefix = f"{figure}_turn_"
        names = {figure: "all"}
        names |= {name: name.removeprefix(prefix) for name in self.table.columns if name.startswith(prefix)}
        return self._evaluated().select("method", *names).rename(names)

    def _evaluated(self) -> pl.DataFrame:
        return self.table.filter(pl.col("skipped").is_null())


def replay_run(run: Path, step: int, methods: Methods = "all") -> Replay:
    """Batch `step` of a run through `methods`, at the weights that step `step` trained from.

    Each is what `objective` would be under `--method`: the run's KL stays. `all` includes `own`, the run's
    objective. Raises `ValueError` where the checkpoint or the batch is not there.
    """
    if not (run / "config.yaml").is_file():
        raise ValueError(f"no run at {str(run)!r}; name the directory of a run, such as runs/quickstart")
    config = load(run / "config.yaml")
    objectives = _objectives(methods, config.objective)
    batch = RecordedBatch(run, step, config)
    notes = {name: note for name, objective in objectives.items() if (note := batch.note(objective))}
    return Replay(_table(objectives, batch.measure, batch.missing, batch.turn_ids), "the model's parameters", notes)


def replay_file(path: Path, methods: Methods = "all") -> Replay:
    """A Parquet file as `agent_rl.dump` describes, through `methods`; the gradient is that of the log-probs.

    Raises `ValueError` on missing columns and on rows whose lists disagree.
    """
    objectives = _objectives(methods, None)
    batch = Dump(path)
    notes = {name: _FORGOT for name, objective in objectives.items() if Objective(objective).clip.learns}

    def measure(objective: ObjectiveConfig) -> Measured:
        found, mask = batch.evaluate(objective), batch.mask
        return Measured(found.loss, found.grad_logprobs[mask], found.metrics, found.gate[mask], found.clipped[mask])

    return Replay(_table(objectives, measure, batch.missing, batch.turn_ids), "the log-probs", notes)


def replay_batch(target: Path, step: int | None, methods: Methods = "all") -> Replay:
    """`replay_run` of a directory, `replay_file` of anything else."""
    if not target.is_dir():
        if step is not None:
            raise ValueError(f"{target} is no run, and a file is one batch; leave out --step")
        return replay_file(target, methods)
    if step is None:
        known = ", ".join(str(_step(path)) for path in list_checkpoints(target))
        raise ValueError(f"say with --step which batch of {target}; its checkpoints: {known or 'none'}")
    return replay_run(target, step, methods)


def write_csv(replayed: Replay, path: Path) -> None:
    """The whole table, skipped methods and columns by turn included."""
    replayed.table.write_csv(path)


_FORGOT = "learns from earlier steps and starts here without them"


def _objectives(methods: Methods, own: ObjectiveConfig | None) -> dict[str, ObjectiveConfig]:
    """By name, the reference first. Raises `ObjectiveError` (bad_method) on a name that is not known."""
    run = {} if own is None else {"objective": own.model_dump(mode="json")}

    def laid_over(name: str) -> ObjectiveConfig:
        return check(ObjectiveConfig, lay_over(run, name)["objective"], f"method {name}")

    found = {REFERENCE: laid_over(REFERENCE)}
    if not isinstance(methods, str):
        return found | dict(methods)
    names = [OWN] * (own is not None) + method_names() if methods == "all" else methods.split(",")
    for name in (name.strip() for name in names):
        found[name] = own if name == OWN and own is not None else laid_over(name)
    return found


def _table(
    objectives: Mapping[str, ObjectiveConfig],
    measure: Callable[[ObjectiveConfig], Measured],
    missing: Callable[[ObjectiveConfig], str | None],
    turn_ids: Tensor,
) -> pl.DataFrame:
    """Evaluate one after the other, holding two gradients: they are as large as the model."""
    reference = measure(objectives[REFERENCE])
    rows = []
    for name, objective in objectives.items():
        reason = missing(objective)
        try:
            measured = reference if name == REFERENCE else None if reason else measure(objective)
        except ObjectiveError as error:
            measured, reason = None, str(error)
        figures = {} if measured is None else _figures(measured, reference.gradient, turn_ids)
        rows.append({"method": name, **figures, "skipped": reason})
    table = pl.DataFrame(rows, infer_schema_length=None)
    return table.select(pl.exclude("skipped"), pl.col("skipped").cast(pl.String))


def _figures(measured: Measured, reference: Tensor, turn_ids: Tensor) -> dict[str, float | None]:
    means = ("gate_rate", "dropped_fraction", "clip_fraction")
    found: dict[str, float | None] = {
        "loss": measured.loss,
        "gradient_norm": float(measured.gradient.double().norm()),
        "cosine": _cosine(measured.gradient, reference),
        **{name: measured.metrics[name] for name in means},
        **{name: measured.metrics.get(name, float("inf")) for name in ("eps_low", "eps_high")},
    }
    for name, values in (("gate_rate", measured.gate), ("clip_fraction", measured.clipped)):
        for turn in sorted(set(turn_ids.tolist()) - {-1}):
            found[f"{name}_turn_{turn}"] = float(values[turn_ids == turn].double().mean())
    return found


def _cosine(a: Tensor, b: Tensor) -> float:
    """NaN where one of the two is 0: it has no direction."""
    x, y = a.double(), b.double()
    return float(x @ y / (x.norm() * y.norm()))


class RecordedBatch:
    """The batch that a run trained, or would have trained, at `step`, and the policy of the checkpoint there.

    The log-probs are computed once, packed as the trainer packs; each objective's gradient then goes back through
    the model. With several micro-batches their graphs are built again for each, so that memory stays that of one.
    """

    def __init__(self, run: Path, step: int, config: RunConfig) -> None:
        if not isinstance(config.trainer, TorchEngine.Config):
            raise ValueError(f"replay works with trainer torch, and {run} has trainer {config.trainer.type}")
        checkpoint = _checkpoint(run, step)
        self.step, self.config, self.checkpoint = step, config, checkpoint
        self.trajectories, self.proximal = _read_batch(run, step, checkpoint)
        self.limit = config.trainer.max_tokens_per_microbatch
        check_lengths(self.trajectories, self.limit)
        self.plan = split([len(t) for t in self.trajectories], self.limit)
        self.model = _model(config, checkpoint)
        self.reference = self._reference_logprobs()
        batches = self._batches(np.zeros(len(self.trajectories), np.float32))
        if not any(len(batch.active) for batch in batches):
            raise ValueError(f"batch {step} of {run} has no sampled token; choose another step")
        self.turn_ids = torch.cat([batch.active.turn_ids for batch in batches])
        with torch.set_grad_enabled(len(batches) == 1):
            found = [token_logprobs(self.model, batch) for batch in batches]
        self.graph = found[0].logprobs if len(batches) == 1 else None
        self.logprobs = [f.logprobs.detach() for f in found]
        self.off_support = [
            f.off_support[b.active.index] for f, b in zip(found, batches, strict=True) if f.off_support is not None
        ]

    def missing(self, objective: ObjectiveConfig) -> str | None:
        """What `objective` reads and the run has not recorded."""
        if "proximal_logprobs" in Objective(objective).needs and self.proximal is None:
            return f"needs proximal_logprobs, which the training facts of step {self.step} do not hold for all"
        return None

    def note(self, objective: ObjectiveConfig) -> str | None:
        """Whether its clip learns from steps that it has not seen."""
        return _FORGOT if Objective(objective).clip.learns and objective.clip != self.config.objective.clip else None

    def measure(self, config: ObjectiveConfig) -> Measured:
        batches = self._batches(_advantages(self.trajectories, config.advantage))
        objective = Objective(config)
        if config.clip == self.config.objective.clip:
            objective.load_state_dict(torch.load(self.checkpoint / "objective.pt", weights_only=True))
        leaves = [values.clone().requires_grad_() for values in self.logprobs]
        step = objective.begin_step(batches, self.logprobs, step=self.step)
        outputs = [objective.loss(values, batch, step) for values, batch in zip(leaves, batches, strict=True)]
        gradients = torch.autograd.grad(sum((o.loss for o in outputs), torch.zeros(())), leaves)
        metrics = step_metrics(batches, outputs, step=step)
        gradient = self._through_the_model(batches, gradients)
        gate, clipped = (_active(batches, outputs, name) for name in ("gate", "clipped"))
        return Measured(metrics["loss"], gradient, metrics, gate, clipped)

    def _through_the_model(self, batches: list[TokenBatch], gradients: Sequence[Tensor]) -> Tensor:
        """The gradient of the parameters, [P], from that of the log-probs of each micro-batch."""
        parameters = list(self.model.parameters())
        total = torch.zeros(sum(p.numel() for p in parameters))
        for batch, gradient in zip(batches, gradients, strict=True):
            logprobs = token_logprobs(self.model, batch)[0] if self.graph is None else self.graph
            parts = torch.autograd.grad(
                logprobs, parameters, gradient, retain_graph=self.graph is not None, materialize_grads=True
            )
            total += torch.cat([part.flatten() for part in parts])
        return total

    def _batches(self, advantages: np.ndarray) -> list[TokenBatch]:
        batches = [pack([self.trajectories[i] for i in part], advantages[part].tolist()) for part in self.plan]
        for name, columns in (("proximal_logprobs", self.proximal), ("ref_logprobs", self.reference)):
            if columns is not None:
                parts = [np.concatenate([columns[i] for i in part]) for part in self.plan]
                batches = [
                    replace(batch, **{name: torch.from_numpy(part)}) for batch, part in zip(batches, parts, strict=True)
                ]
        return batches

    def _reference_logprobs(self) -> list[np.ndarray] | None:
        """Those of the policy that the run began with, if its KL reads them."""
        if not self.config.objective.kl.coefficient:
            return None
        engine = TorchEngine(self.config.trainer, str(model_directory(self.config.model.path)), ObjectiveConfig())
        return list(engine.logprobs(self.trajectories))


def _model(config: RunConfig, checkpoint: Path) -> Any:
    """The policy as the trainer holds it."""
    return TorchEngine(config.trainer, str(checkpoint), ObjectiveConfig()).model


def _checkpoint(run: Path, step: int) -> Path:
    found = {_step(path): path for path in list_checkpoints(run)}
    if step not in found:
        known = f"there are those of steps {', '.join(map(str, found))}" if found else "there is none"
        raise ValueError(f"{run} has no checkpoint of step {step}; {known}")
    return found[step]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _read_batch(run: Path, step: int, checkpoint: Path) -> tuple[list[Trajectory], list[np.ndarray] | None]:
    """(trajectories, proximal log-probs if recorded for all): what step `step` trained, in its order, or has queued."""
    rows = facts.read_part(run / ROLLOUT_TABLE, step)
    training = [row for row in facts.read_part(run / TRAINING_TABLE, step) if row["fate"] == "trained"]
    queue = RunState.load(checkpoint).queue
    if not rows or (not training and step not in queue):
        raise ValueError(f"{run} has no recorded batch for step {step}: it was neither trained nor queued there")
    if not training:
        return [facts.trajectory(row) for row in rows if row["group_id"] in queue[step]], None
    training.sort(key=lambda row: row["order"])
    recorded = {row["episode_id"]: row for row in rows}
    trajectories = [facts.trajectory(recorded[row["episode_id"]]) for row in training]
    columns = [row.get("proximal_logprobs") for row in training]
    if any(column is None for column in columns):
        return trajectories, None
    return trajectories, [np.asarray(column, np.float32) for column in columns]


def _advantages(trajectories: Sequence[Trajectory], config: AdvantageConfig) -> np.ndarray:
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)
    groups = torch.tensor([t.group_id for t in trajectories])
    return group_advantages(rewards, groups, config).numpy()


def _active(batches: Sequence[TokenBatch], outputs: Sequence[LossOutput], name: str) -> Tensor:
    return torch.cat([getattr(o, name)[b.active.index] for o, b in zip(outputs, batches, strict=True)])
