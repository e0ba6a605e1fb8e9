"""Channels in buckets refuse, before a run starts, the engines that they cannot reach."""

import pytest

from tests.configs import quickstart

SGLANG = "rollout.engine.type=sglang"
REFUSED = [
    (("weights.type=tensor", SGLANG, "rollout.engine.on_update=drain"), "sample in between"),
    (("weights.type=distributed", SGLANG, "rollout.engine.on_update=drain"), "set rollout.engine.on_update to retract"),
    (("weights.type=distributed", SGLANG, "rollout.engine.dp_size=2"), "raise rollout.num_workers instead"),
    (
        ("weights.type=tensor", SGLANG, "rollout.engine.urls=[http://10.0.0.7:30000]"),
        "weights.type disk or distributed",
    ),
    (("weights.type=distributed", "weights.backend=nccl"), "use gloo"),
]
ACCEPTED = [
    ("weights.type=distributed", SGLANG, "rollout.engine.on_update=in_place", "rollout.engine.tp_size=2"),
    ("weights.type=distributed", SGLANG, "rollout.engine.urls=[http://10.0.0.7:30000]"),
    ("weights.type=tensor", SGLANG, "rollout.engine.urls=[http://127.0.0.1:30000]"),
    ("weights.type=shared_memory", SGLANG, "rollout.engine.on_update=drain", "rollout.engine.dp_size=2"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_an_engine_that_is_not_reached_is_refused_with_a_sentence(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quickstart(*overrides)


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_other_engines_are_not(overrides: tuple[str, ...]) -> None:
    assert quickstart(*overrides).weights.type == overrides[0].partition("=")[2]
