"""The tree is the registry: every file of a kind is a part, and wrong names get the nearest right one."""

import pytest

from agent_rl import registry
from agent_rl.settings import check


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in registry.PACKAGES for name in registry.names(kind)]
)
def test_every_file_of_a_kind_defines_one_part_of_that_type(kind: str, name: str) -> None:
    part = registry.find(kind, name)
    assert part.__module__ == f"{registry.PACKAGES[kind]}.{name}"
    assert part.Config.model_fields["type"].annotation is not None


def test_a_dotted_path_names_a_part_of_the_users_own() -> None:
    assert registry.find("clip", "agent_rl.objective.clips.ppo.PPO").__name__ == "PPO"
    with pytest.raises(ValueError, match="is not a part"):
        registry.find("clip", "collections.Counter")
    with pytest.raises(ValueError, match="cannot be imported"):
        registry.find("clip", "no_such_package.Clip")


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown engine type 'embeded'; did you mean 'embedded'"):
        registry.find("engine", "embeded")


def test_a_parts_keys_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown key 'x'"):
        check(registry.find("weights", "shared_memory").Config, {"type": "shared_memory", "x": 1})
