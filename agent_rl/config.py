"""The config of a run: one pydantic tree, read from YAML, overridable by `a.b.c=value` on the command line."""

import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, field_validator, model_validator

from agent_rl import registry
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.methods import lay_over
from agent_rl.pipeline.config import LoggingConfig, RayConfig, WatchdogConfig
from agent_rl.registry import PartKind
from agent_rl.rollout.config import RolloutConfig, SamplingConfig
from agent_rl.routers import ROUTED_MODELS
from agent_rl.settings import Settings, check
from sandbox.backends import BackendConfig
from sandbox.zygote import ZygoteConfig

BUILTIN = "builtin:"


class SandboxConfig(Settings):
    """The tool server: one that the run starts and supervises, or one that is already there."""

    url: str | None = None
    """Address of a running tool server; null starts one on loopback for this run."""
    server: BackendConfig = ZygoteConfig()
    """The server that the run starts: `type: zygote` or `docker`, sessions, limits. One at `url` has its own."""
    patience_s: float = Field(60.0, gt=0)
    """How long a run waits for a tool server that has gone before it stops with a message."""


class EvalSamplingConfig(SamplingConfig):
    """How evaluation episodes are sampled."""

    temperature: float = Field(1.0, ge=0)
    """Logits are divided by this; 0 is greedy."""


class EvalConfig(Settings):
    """Held-out evaluation: the same prompts, sampler, budget, tools and scorer for every policy."""

    prompts: Annotated[Any, PartKind("prompts")] = Field({"type": "chains", "split": "heldout"}, validate_default=True)
    """Where held-out prompts come from: a file of `agent_rl/data/sources/`."""
    num_prompts: int = Field(128, ge=1)
    """How many prompts, from the source's first on, at every evaluation; a shorter source gives each prompt once."""
    allow_overlap: bool = False
    """Start a run although some of these prompts are trained on as well."""
    num_samples: int = Field(1, ge=1)
    """Episodes a prompt: avg@k, pass@k and maj@k are over these."""
    sampling: EvalSamplingConfig | None = None
    """How tokens are drawn in evaluation; null draws them as in training."""
    every: int = Field(5, ge=0)
    """Steps (rollout batches) between evaluations; the final policy is evaluated too. 0 never evaluates."""
    workers: int = Field(0, ge=0)
    """Rollout workers for evaluation alone, beside `rollout.num_workers`: training goes on while they evaluate, and a
    later line of metrics.jsonl has the figures, with `eval_step` and `eval_policy_version`. An evaluation that is due
    waits for the one before. With 0 the workers of training evaluate, and each such step waits for it."""


class BatchConfig(Settings):
    """What one step of a run trains on."""

    num_prompts: int = Field(16, ge=1)
    """Prompts a step."""
    group_size: int = Field(8, ge=1)
    """Episodes a prompt. Advantages within groups need at least 2; `reinforce_pp`, over the whole batch, needs 1."""
    max_replacements: int = Field(0, ge=0)
    """Dynamic sampling: groups whose outcomes are all the same are not trained on, and up to so many further prompts a
    batch take their place, sampled with the same weights; 0 trains on every group."""


class ModelConfig(Settings):
    """The policy's initial weights; also the KL reference."""

    path: str = "builtin:tiny-qwen3"
    """A directory with a Hugging Face causal LM and its tokenizer, `builtin:tiny-qwen3` or `builtin:tiny-qwen3-moe`."""

    @field_validator("path")
    @classmethod
    def _exists(cls, value: str) -> str:
        path = model_directory(value)
        if not (path / "config.json").is_file():
            raise ValueError(
                f"no model at {str(path)!r} (no config.json there); name a local directory, hub ids are not fetched"
            )
        if not (path / "tokenizer_config.json").is_file():
            raise ValueError(f"the model in {str(path)!r} has no tokenizer (no tokenizer_config.json); copy it there")
        return value

    @property
    def directory(self) -> Path:
        """Where the model's files are."""
        return model_directory(self.path)


class CheckpointConfig(Settings):
    """When checkpoints are written, and which are kept."""

    every: int = Field(10, ge=0)
    """Steps (rollout batches) between checkpoints; 0 saves only when the run ends or is stopped."""
    keep: int = Field(2, ge=1)
    """How many of the newest checkpoints are kept."""
    keep_best: int = Field(0, ge=0)
    """How many more are kept for the best `eval_avg`; checkpoints without an evaluation do not count."""


class RunConfig(Settings):
    """Everything that defines a run."""

    seed: int = 0
    """Every random choice is hashed from this."""
    num_steps: int = Field(40, ge=1)
    """Rollout batches to train on; one optimizer step each, unless the trainer reuses a batch for several."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """Where training starts from."""
    routing_replay: bool = False
    """Rollout routing replay (R3), for mixtures of experts: record which experts the engine chose for every token
    and let the trainer choose the same. `--method` decides it too: on for the `*_r3` methods, off for the others."""
    prompts: Annotated[Any, PartKind("prompts")] = Field({"type": "chains"}, validate_default=True)
    """Where problems come from: a file of `agent_rl/data/sources/`."""
    batch: BatchConfig = BatchConfig()
    """How many episodes a step has."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """How episodes are driven."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where tools run code."""
    reward: Annotated[Any, PartKind("reward")] = Field({"type": "math"}, validate_default=True)
    """How episodes are scored: a file of `agent_rl/rewards/`."""
    pipeline: Annotated[Any, PartKind("pipeline")] = Field({"type": "sync"}, validate_default=True)
    """The regime, and with it the lag: a file of `agent_rl/pipeline/regimes/`."""
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    """What is maximised."""
    trainer: Annotated[Any, PartKind("trainer")] = Field({"type": "torch"}, validate_default=True)
    """What updates the policy: a file of `agent_rl/trainer/engines/`."""
    weights: Annotated[Any, PartKind("weights")] = Field({"type": "shared_memory"}, validate_default=True)
    """How weights travel: a file of `agent_rl/weights/`."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """What happens when the run stands still."""
    ray: RayConfig = RayConfig()
    """Which Ray the run uses."""
    logging: LoggingConfig = LoggingConfig()
    """Where figures go besides metrics.jsonl and TensorBoard."""

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.batch.group_size < 2 and self.objective.advantage.estimator != "reinforce_pp":
            raise ValueError(
                "batch.group_size is 1, but group advantages compare the episodes of a prompt; "
                "set batch.group_size to 2 or more, or objective.advantage.estimator to reinforce_pp"
            )
        if self.batch.group_size < 2 and self.batch.max_replacements:
            raise ValueError(
                "batch.max_replacements takes the place of groups without spread, which all groups of one episode are; "
                "set it to 0 or batch.group_size to 2 or more"
            )
        return self

    @property
    def num_trainer_ranks(self) -> int:
        """Processes that the trainer has."""
        return int(self.trainer.num_ranks)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps, each a policy version, that the trainer makes of one rollout batch."""
        return int(self.trainer.updates_per_batch)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for part in registry.part_configs(self):
            part.check_run(self)
        return self

    @model_validator(mode="after")
    def _routing_can_be_replayed(self) -> Self:
        if not self.routing_replay:
            return self
        model_type = json.loads((self.model.directory / "config.json").read_text()).get("model_type")
        if model_type not in ROUTED_MODELS:
            raise ValueError(
                f"routing_replay is for mixtures of experts ({', '.join(ROUTED_MODELS)}), but {self.model.path} is a "
                f"{model_type} model; set routing_replay to false"
            )
        for key, kind, part in (
            ("rollout.engine", "engine", self.rollout.engine),
            ("trainer", "trainer", self.trainer),
        ):
            if not registry.find(kind, part.type).can_replay_routing:
                raise ValueError(f"routing_replay is true, but {key} {part.type} has none; choose another {key}")
        return self

    @model_validator(mode="after")
    def _tools_have_schemas(self) -> Self:
        for tool in self.rollout.tools:
            registry.find("tool", tool.type).schema()
        return self

    @model_validator(mode="after")
    def _sessions_suffice(self) -> Self:
        wanted = (self.rollout.num_workers + self.eval.workers) * self.rollout.max_concurrent_episodes
        if self.sandbox.url is None and wanted > self.sandbox.server.max_sessions:
            raise ValueError(
                f"(rollout.num_workers + eval.workers) x max_concurrent_episodes is {wanted}, but the tool server "
                f"has {self.sandbox.server.max_sessions} sessions; raise sandbox.server.max_sessions"
            )
        return self


def model_directory(path: str) -> Path:
    """The directory that `model.path` names."""
    if path.startswith(BUILTIN):
        return Path(str(resources.files("agent_rl") / "assets" / path.removeprefix(BUILTIN)))
    return Path(path)


def load(
    path: Path, overrides: list[str] | None = None, method: str | None = None, overlays: list[Path] | None = None
) -> RunConfig:
    """Read a run's config, lay further files and a method's objective over it, then apply the overrides.

    Raises `ValueError` with one sentence a problem.
    """
    mapping = read_yaml(path)
    for overlay in overlays or []:
        mapping = merge(mapping, read_yaml(overlay))
    if method is not None:
        mapping = lay_over(mapping, method)
    for override in overrides or []:
        apply_override(mapping, override)
    return check(RunConfig, mapping, str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `ValueError` if the file is missing or holds no valid mapping."""
    if not path.is_file():
        raise ValueError(f"no config file at {str(path)!r}; see configs/ for ready ones")
    try:
        mapping = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(mapping, dict):
        raise ValueError(f"{path} must hold a mapping of config keys")
    return mapping


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over`: mappings are merged, but a part (a mapping with a `type`) is replaced whole."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and "type" not in value:
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def apply_override(mapping: dict[str, Any], override: str) -> None:
    """Set one dotted key in place. Changing a part's `type` keeps only the keys that the new part has too."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ValueError(f"override {override!r} must read key=value, such as objective.clip.type=sat")
    *path, last = dotted.split(".")
    node = mapping
    for position, key in enumerate(path):
        child = node.get(key)
        node[key] = {"type": child} if isinstance(child, str) else ({} if child is None else child)
        node = node[key]
        if not isinstance(node, dict):
            where = ".".join(path[: position + 1])
            raise ValueError(f"override {override!r}: {where} holds no keys; set it whole, as in {where}=VALUE")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"override {override!r}: {text!r} is not a YAML value; quote it") from None
    if last == "type" and node.get("type") != value and (kind := part_kind(path)):
        known = registry.find(kind, str(value)).Config.model_fields
        node_kept = {key: kept for key, kept in node.items() if key in known}
        node.clear()
        node.update(node_kept)
    node[last] = value


def part_kind(path: list[str]) -> str | None:
    """The registry kind of the part at a dotted path of `RunConfig`, or None where no part stands."""
    model: Any = RunConfig
    for position, key in enumerate(path):
        field = getattr(model, "model_fields", {}).get(key)
        if field is None:
            return None
        kinds = [m.kind for m in field.metadata if isinstance(m, PartKind)]
        if kinds:
            return kinds[0] if position == len(path) - 1 else None
        model = field.annotation
    return None


def dump(config: RunConfig) -> str:
    """The resolved config as YAML that `load` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
