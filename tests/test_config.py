"""Configs: every shipped one loads, bad ones get one sentence that says what to do."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, Field

from agent_rl import registry
from agent_rl.config import RunConfig, SandboxConfig, apply_override, dump, load
from agent_rl.run import train
from agent_rl.settings import Settings, check

LAG_20 = {"pipeline": {"type": "batch_async", "exact_lag": 20}}
MIXTURE = {"model": {"path": "builtin:tiny-qwen3-moe"}, "routing_replay": True}
CONFIGS = Path(__file__).parent.parent / "configs"


ELSEWHERE = {"qwen3_1.7b_8gpu.yaml", "qwen3_30b_a3b_r3.yaml"}
"""Their models do not ship: tests/rollout/test_sglang_messages.py checks them with another in its place."""


@pytest.mark.parametrize(
    "path", sorted(p for p in CONFIGS.glob("*.yaml") if p.name not in ELSEWHERE), ids=lambda path: path.name
)
def test_every_shipped_config_loads(path: Path) -> None:
    if path.name.startswith("warmstart"):
        from agent_rl.warmstart.config import WarmstartConfig

        assert check(WarmstartConfig, yaml.safe_load(path.read_text()), path.name).teach
    else:
        assert load(path).num_steps >= 1


def test_a_dumped_config_loads_to_the_same(tmp_path: Path) -> None:
    config = load(CONFIGS / "quickstart.yaml", ["objective.clip.type=sat", "pipeline.exact_lag=8"])
    copy = tmp_path / "config.yaml"
    copy.write_text(dump(config))
    assert load(copy) == config
    assert (config.objective.clip.type, config.pipeline.exact_lag) == ("sat", 8)


def test_a_method_replaces_the_objective_and_overrides_come_last() -> None:
    config = load(CONFIGS / "quickstart.yaml", ["objective.clip.alpha=0.8"], method="sat_gspo")
    assert (config.objective.ratio.level, config.objective.clip.type, config.objective.clip.alpha) == (
        "sequence",
        "sat",
        0.8,
    )
    with pytest.raises(ValueError, match="unknown method 'sat_gsp'; did you mean"):
        load(CONFIGS / "quickstart.yaml", method="sat_gsp")


def test_switching_a_part_keeps_only_the_keys_that_the_new_part_has() -> None:
    mapping: dict[str, Any] = {
        "objective": {"clip": {"type": "sat", "alpha": 0.8, "eps_low": 0.1}},
        "pipeline": {"type": "batch_async", "exact_lag": 3},
    }
    apply_override(mapping, "objective.clip.type=ppo")
    apply_override(mapping, "pipeline.type=sync")
    assert mapping == {"objective": {"clip": {"type": "ppo", "eps_low": 0.1}}, "pipeline": {"type": "sync"}}
    assert check(RunConfig, mapping).objective.clip.eps_low == 0.1


@pytest.mark.parametrize(
    ("mapping", "sentence"),
    [
        ({"num_step": 3}, "unknown key 'num_step'; did you mean 'num_steps'?"),
        ({"rollout": {"max_tool_turns": 3}}, "unknown key 'rollout.max_tool_turns'; did you mean 'max_tool_turn'?"),
        (
            {"objective": {"clip": {"type": "sat", "alfa": 0.9}}},
            "unknown key 'alfa' in clip sat; did you mean 'alpha'?",
        ),
        ({"objective": {"clip": "satt"}}, "unknown clip type 'satt'; did you mean 'sat'?"),
        ({"rollout": {"sampling": {"top_p": 0}}}, "top_p must lie in (0, 1], got 0"),
        ({"rollout": {"sampling": {"top_p": 1.5}}}, "top_p must lie in (0, 1], got 1.5"),
        ({"batch": {"group_size": 1}}, "batch.group_size is 1, but group advantages compare"),
        (
            {
                "batch": {"group_size": 1, "max_replacements": 1},
                "objective": {"advantage": {"estimator": "reinforce_pp"}},
            },
            "batch.max_replacements takes the place of groups without spread",
        ),
        (
            {"rollout": {"tool_format": "hermes", "tools": ["tests.parts.VagueTool"]}},
            "annotate the parameter 'text' of",
        ),
        ({"model": {"path": "no/such/model"}}, "no model at 'no/such/model'"),
        ({"pipeline": {"type": "batch_async"}}, "exactly one of exact_lag and broadcast_interval"),
        ({"routing_replay": True}, "but builtin:tiny-qwen3 is a qwen3 model; set routing_replay to false"),
        (
            MIXTURE | {"rollout": {"engine": "tests.parts.PlainEngine"}},
            "but rollout.engine tests.parts.PlainEngine has",
        ),
        (MIXTURE | {"trainer": "tests.parts.PlainTrainer"}, "but trainer tests.parts.PlainTrainer has none"),
        ({"prompts": {}}, "prompts: must be a mapping with a `type`; known prompts types: arithmetic"),
        ({"trainer": "tests.parts.PlainEngine"}, "the Config of trainer tests.parts.PlainEngine must derive from Tr"),
        ({"eval": {"prompts": "tests.parts.RefusesAll"}}, "no run suits it"),
        ({"reward": {"type": "no.such.Thing"}}, "'no.such.Thing' cannot be imported"),
        ({"reward": {"type": ".."}}, "reward type '..' is no dotted path"),
        ({"reward": {"type": "function", "path": ".."}}, "'..' is no dotted path"),
        ({"trainer": {"type": "torch", "max_tokens_per_microbatch": 99}}, "trainer.max_tokens_per_microbatch is 99"),
        (LAG_20 | {"trainer": {"type": "torch", "proximal": {"every": 1}}}, "max_snapshots to 21 or more"),
        (LAG_20 | {"objective": {"gates": ["tis"], "ratio": {"denominator": "proximal"}}}, "max_snapshots to 21 or"),
        ({"num_steps": 0}, "num_steps: Input should be greater than or equal to 1, got 0"),
        ({"num_steps": "abc"}, "num_steps: must be an integer, got 'abc'"),
        ({"rollout": {"tools": "python"}}, "rollout.tools: must be a list, got 'python'"),
        ({"pipeline": {"type": "batch_async", "exact_lag": -1}}, "pipeline.exact_lag: Input should be"),
        ({"rollout": {"tool_format": "bare", "tools": ["python", "python"]}}, "use tool_format hermes for several"),
        ({"sandbox": {"server": {"type": "podman"}}}, "sandbox.server: must be a mapping whose `type` is zygote"),
        ({"sandbox": {"server": {"max_sesions": 9}}}, "'sandbox.server.max_sesions'; did you mean 'max_sessions'?"),
        (
            {"sandbox": {"server": {"type": "docker", "imag": "x"}}},
            "unknown key 'sandbox.server.imag'; did you mean 'image'?",
        ),
        (
            {"sandbox": {"server": {"type": "docker", "limits": {"memory_mb": 3}}}},
            "sandbox.server.limits.memory_mb: Input should be greater than or equal to 32, got 3",
        ),
    ],
)
def test_bad_values_get_one_sentence(mapping: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        check(RunConfig, mapping)
    assert "\n" not in str(caught.value)


def test_the_sandbox_is_the_zygotes_unless_the_config_says_docker() -> None:
    assert check(RunConfig, {"sandbox": {"server": {"max_sessions": 200}}}).sandbox.server.type == "zygote"
    docker = check(RunConfig, {"sandbox": {"server": {"type": "docker", "cpus": 2}}}).sandbox
    assert (docker.server.type, docker.server.model_dump()["cpus"]) == ("docker", 2.0)
    assert check(SandboxConfig, docker.model_dump(mode="json")) == docker  # as it travels to the server's own process


def test_keys_inside_lists_and_optional_models_get_the_nearest_name_too() -> None:
    class Inner(Settings):
        value: int = 0

    class Outer(Settings):
        many: list[Inner] = Field(default_factory=list)
        maybe: Inner | None = None

    with pytest.raises(ValueError, match=r"unknown key 'many\.0\.valu'; did you mean 'value'"):
        check(Outer, {"many": [{"valu": 1}]})
    with pytest.raises(ValueError, match=r"unknown key 'maybe\.valu'; did you mean 'value'"):
        check(Outer, {"maybe": {"valu": 1}})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("a: [", "line 1: not valid YAML"), ("- 1", "must hold a mapping")],
)
def test_unreadable_files_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        load(path)
    with pytest.raises(ValueError, match=r"no config file at 'absent.yaml'"):
        load(Path("absent.yaml"))


def test_a_missing_prompt_file_is_named_before_anything_starts(tmp_path: Path) -> None:
    config = check(RunConfig, {"prompts": {"type": "jsonl", "path": "no/such.jsonl"}})
    with pytest.raises(ValueError, match=r"no/such\.jsonl"):
        train(config, tmp_path / "run", False, lambda row: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("objective.clip.type", "must read key=value"),
        ("num_steps.x=1", "num_steps holds no keys"),
        ("rollout.tools.0.wall_s=2", "rollout.tools holds no keys"),
        ("seed=[1", "is not a YAML value"),
    ],
)
def test_overrides_that_cannot_be_applied_say_why(override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        apply_override({"num_steps": 3, "rollout": {"tools": ["python"]}}, override)


def config_models() -> Iterator[type[BaseModel]]:
    """The models of a run's config, and the `Config` of every built-in part."""
    waiting: list[type[BaseModel]] = [RunConfig]
    waiting += [registry.find(kind, name).Config for kind in registry.PACKAGES for name in registry.names(kind)]
    while waiting:
        model = waiting.pop()
        yield model
        annotations = [field.annotation for field in model.model_fields.values()]
        waiting += [a for a in annotations if isinstance(a, type) and issubclass(a, BaseModel)]


def test_every_key_of_every_config_says_what_it_is() -> None:
    silent = [
        f"{model.__qualname__}.{name}"
        for model in config_models()
        for name, field in model.model_fields.items()
        if name != "type" and not field.description and not attribute_docstring(model, name)
    ]
    assert not silent


def attribute_docstring(model: type[BaseModel], name: str) -> bool:
    """Whether a docstring follows the field in the source: what models without `use_attribute_docstrings` have."""
    return re.search(rf'\n +{name}: [^"]*?(\n? *=)?.*\n +"""', inspect.getsource(model)) is not None


def test_one_episode_a_prompt_will_do_where_advantages_are_over_the_batch() -> None:
    keys = {"batch": {"group_size": 1}, "objective": {"advantage": {"estimator": "reinforce_pp"}}}
    assert check(RunConfig, keys).batch.group_size == 1
