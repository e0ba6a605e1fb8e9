"""A batch that another framework dumped: a Parquet file with one row a trajectory, ready to be evaluated."""

from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from agent_rl.objective import ObjectiveValues, evaluate
from agent_rl.objective.advantage import group_advantages
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.loss import Objective

SCALARS = ("group_id", "reward")
LISTS = ("logprobs", "behavior_logprobs", "loss_mask", "turn_ids")
OPTIONAL = ("proximal_logprobs", "ref_logprobs", "kept_set_sizes", "advantages")


class Dump:
    """The columns as padded [B, T] float64 tensors; B rows, T the longest of them.

    group_id (int or string) and reward: one a row. Lists of one number a token, as long as the row's `logprobs`:
    logprobs of the policy, behavior_logprobs of what was sampled from, loss_mask (true on tokens that the policy
    sampled), turn_ids (from 0), and, optional, proximal_logprobs, ref_logprobs and kept_set_sizes (0: full
    vocabulary). advantages, optional, one a token or one a row, stand for every objective's own estimate.
    Where loss_mask is false nothing else is read. Raises `ValueError` on a file that is not of this form.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = _read(path)
        self.groups, self.rewards = _groups(rows), torch.tensor([float(row["reward"]) for row in rows])
        self.arrays = {name: _pad(path, name, rows) for name in (*LISTS, *OPTIONAL) if name in rows[0]}
        self.mask = self.arrays["loss_mask"] = self.arrays["loss_mask"] != 0
        self.turn_ids = self.arrays["turn_ids"][self.mask].long()

    def missing(self, objective: ObjectiveConfig) -> str | None:
        """A sentence on the columns that `objective` reads and the file lacks; None if it lacks none."""
        absent = sorted(Objective(objective).needs - self.arrays.keys())
        return f"needs {', '.join(absent)}, which {self.path} does not have" if absent else None

    def evaluate(self, objective: ObjectiveConfig) -> ObjectiveValues:
        """Evaluate `objective`, with the file's advantages or else those of the objective's own estimator."""
        estimated = {}
        if "advantages" not in self.arrays:
            each = group_advantages(self.rewards, self.groups, objective.advantage)
            estimated["advantages"] = each[:, None].expand(self.mask.shape)
        return evaluate(objective, **self.arrays, **estimated)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"no run and no Parquet file at {str(path)!r}")
    try:
        table = pl.read_parquet(path)
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from None
    absent = [name for name in (*SCALARS, *LISTS) if name not in table.columns]
    if absent:
        raise ValueError(f"{path} lacks the columns {', '.join(absent)}; docs/replay.md says what each holds")
    if table.is_empty():
        raise ValueError(f"{path} has no row; it needs one a trajectory")
    rows = table.select(name for name in (*SCALARS, *LISTS, *OPTIONAL) if name in table.columns).to_dicts()
    for index, row in enumerate(rows):
        if row["group_id"] is None or not isinstance(row["reward"], (int, float)):
            raise ValueError(f"{path}, row {index}: group_id and reward must be there, and reward a number")
        if not isinstance(row["logprobs"], list):
            raise ValueError(f"{path}, row {index}: logprobs must be a list of numbers, one a token")
    return rows


def _groups(rows: list[dict[str, Any]]) -> Tensor:
    """Group ids, int64 [B]; ids that are no integers are numbered as they come."""
    ids = [row["group_id"] for row in rows]
    if all(isinstance(i, int) for i in ids):
        return torch.tensor(ids)
    number = {name: index for index, name in enumerate(dict.fromkeys(ids))}
    return torch.tensor([number[name] for name in ids])


def _pad(path: Path, name: str, rows: list[dict[str, Any]]) -> Tensor:
    """The column `name` as float64 [B, T], 0 past the end of a row and for a null outside of the loss mask."""
    padded = torch.zeros(len(rows), max(len(row["logprobs"]) for row in rows), dtype=torch.float64)
    for index, row in enumerate(rows):
        length, values = len(row["logprobs"]), row[name]
        if name == "advantages" and isinstance(values, (int, float)):
            values = [values] * length
        mask = row["loss_mask"]
        if isinstance(values, list) and isinstance(mask, list) and len(values) == len(mask):
            values = [value if active else value or 0.0 for value, active in zip(values, mask, strict=True)]
        numbers = isinstance(values, list) and all(isinstance(value, (int, float)) for value in values)
        if not numbers or len(values) != length:
            raise ValueError(f"{path}, row {index}: {name} must be a list of {length} numbers, as long as logprobs")
        padded[index, :length] = torch.tensor(values, dtype=torch.float64)
    return padded
