"""The live view of a run: a table that updates, or one line a step without a terminal."""

import time
from collections import deque
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

_SHOWN_STEPS = 12
_COLUMNS = {
    "step": ("step", "{:d}"),
    "reward": ("reward_mean", "{:.3f}"),
    "eval": ("eval_avg", "{:.3f}"),
    "tokens/s": ("tokens_per_s", "{:,.0f}"),
    "lag": ("lag_mean", "{:.1f}"),
    "mean |d|": ("mismatch_mean_abs", "{:.4f}"),
    "gate": ("gate_rate", "{:.3f}"),
    "clip": ("clip_fraction", "{:.3f}"),
    "budget": ("bound_budget", "{:.2f}"),
    "entropy": ("entropy", "{:.3f}"),
    "s/step": ("wall_s", "{:.1f}"),
}


class LiveView:
    """Context manager; call `show(row)` with each row of metrics.jsonl."""

    def __init__(self, console: Console, title: str, num_steps: int) -> None:
        self.console, self.num_steps = console, num_steps
        self.rows: deque[dict[str, Any]] = deque(maxlen=_SHOWN_STEPS)
        self.first: tuple[int, float] | None = None
        self.progress = Progress(
            TextColumn(f"[bold]{title}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self.task = self.progress.add_task("steps", total=num_steps, left="starting Ray, the tool server, the engine")
        self.live = Live(self._render(), console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        else:
            self.console.print("starting Ray, the tool server and the engine …")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def show(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        left = self._time_left(row["step"])
        self.progress.update(self.task, completed=min(row["step"] + 1, self.num_steps), left=left)
        if self.live:
            self.live.update(self._render())
        else:
            self.console.print(_line(row, left), highlight=False, soft_wrap=True)

    def _time_left(self, step: int) -> str:
        """Wall time left at the pace since the first step that was shown.

        It is measured anew from a step that is shown again: the run went back to a checkpoint.
        """
        if self.first is None or step <= self.first[0] or step >= self.num_steps:
            self.first = (step, time.monotonic())
            return ""
        seconds = (time.monotonic() - self.first[1]) / (step - self.first[0]) * (self.num_steps - step - 1)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} left"

    def _render(self) -> RenderableType:
        table = Table(box=None, header_style="bold", padding=(0, 1), collapse_padding=True)
        for heading in _COLUMNS:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(_cell(row, key, form) for key, form in _COLUMNS.values()))
        return Group(self.progress, table, *[_ledger(row) for row in list(self.rows)[-1:] if "groups/issued" in row])


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return "" if value is None else form.format(value)


def _ledger(row: dict[str, Any]) -> str:
    """The counts of prompt groups by what became of them; their sum shows that none is lost."""
    issued, *rest = (row[f"groups/{fate}"] for fate in ("issued", "trained", "dropped", "in_flight"))
    return "groups: {} issued = {} trained + {} dropped + {} in flight".format(issued, *rest)


def _line(row: dict[str, Any], left: str) -> str:
    cells = [(heading, _cell(row, key, form)) for heading, (key, form) in _COLUMNS.items()]
    found = [f"{heading} {cell}" for heading, cell in cells if cell]
    return "  ".join([*found, *([_ledger(row)] if "groups/issued" in row else []), *([left] if left else [])])
