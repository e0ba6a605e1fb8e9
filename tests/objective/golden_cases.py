"""Reads the golden cases: the copy in tests/golden, and ../shared/golden where that exists and says otherwise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

COPY = Path(__file__).parents[1] / "golden"
SHARED = Path(__file__).parents[3] / "shared" / "golden"

DTYPES = [torch.float64, torch.float32]
TOLERANCES = {torch.float64: {"rtol": 1e-12, "atol": 1e-15}, torch.float32: {"rtol": 2e-5, "atol": 1e-7}}


def cases(name: str, later: Any = None) -> list[Any]:
    """The cases of one file as pytest parameters. `later(case)` gives the reason to skip one, or None."""
    texts = {"": (COPY / name).read_text()}
    if (SHARED / name).exists() and (SHARED / name).read_text() != texts[""]:
        texts["shared:"] = (SHARED / name).read_text()
    found = []
    for prefix, text in texts.items():
        for case in json.loads(text)["cases"]:
            reason = later(case) if later else None
            marks = [pytest.mark.skip(reason=reason)] if reason else []
            found.append(pytest.param(case, id=prefix + case["name"], marks=marks))
    assert found
    return found


def array(values: Any) -> np.ndarray:
    """Nested lists of numbers and the strings nan, inf, -inf."""
    return np.asarray(values, dtype=object).astype(np.float64)


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.as_tensor(array(values), dtype=dtype)


def assert_close(actual: Any, expected: Any, dtype: torch.dtype, scale: float = 1.0) -> None:
    tolerance = {name: value * scale for name, value in TOLERANCES[dtype].items()}
    np.testing.assert_allclose(np.asarray(actual, np.float64), array(expected), **tolerance)
