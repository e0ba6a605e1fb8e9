"""The SGLang engine does what every engine must, against a real server."""

from collections.abc import Callable

import pytest

from tests.rollout.engine_conformance import CHECKS, PARITY, Subject, check_parity_over_turns
from tests.sglang_cpu.conftest import Shared
from tests.sglang_cpu.servers import CONTEXT, engine_on, other_weights


@pytest.fixture
def subject(dense: Shared) -> Subject:
    other = str(other_weights(dense.model))
    return Subject(lambda: engine_on(dense.url, dense.model), str(dense.model), other, CONTEXT, tolerance=2e-5)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(subject: Subject, check: Callable[[Subject], None]) -> None:
    check(subject)


@pytest.mark.parametrize(("temperature", "top_p"), PARITY)
def test_parity_over_turns(subject: Subject, temperature: float, top_p: float) -> None:
    check_parity_over_turns(subject, temperature, top_p)
