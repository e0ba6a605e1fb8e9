"""What every command says: lines, tables, and one sentence for a user's mistake."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import polars as pl

console = Console()


def say(sentence: str) -> None:
    """Print one line, unbroken: paths in it can be copied."""
    console.print(sentence, highlight=False, soft_wrap=True)


@contextmanager
def one_sentence_errors(hint: Callable[[], str] = str) -> Iterator[None]:
    """What the user can mend is one sentence and exit code 2; a traceback is for our own bugs."""
    try:
        yield
    except Exception as error:
        from sandbox.base import SandboxError

        cause = getattr(error, "cause", None) or error  # Ray wraps what an actor raised
        if not _from_ray(cause) and not isinstance(cause, (ValueError, OSError, SandboxError)):
            raise
        Console(stderr=True).print(f"[bold red]error:[/] {_sentence(cause)}{hint()}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        say(f"stopped at once{hint()}")
        raise typer.Exit(130) from None


def _from_ray(error: BaseException) -> bool:
    """An actor that died, a store that is full."""
    return type(error).__module__.startswith("ray.")


def _sentence(error: BaseException) -> str:
    """What to tell of an error. Where an actor died as it was made, Ray's text ends with the reason."""
    text = str(error).strip()
    if not _from_ray(error):
        return text
    lines = text.splitlines()
    return lines[-1].strip() if "creation task" in lines[0] else f"{type(error).__name__}: {lines[0].rstrip('.')}"


_HEADINGS = {
    "mean_abs_d": "mean |d|",
    "gate_rate": "gate",
    "clip_fraction": "clip",
    "kept_size": "kept",
    "lag_mean": "lag",
    "policy_lag": "policy",
    "implementation": "implem.",
    "stop_reason": "stop reason",
    "reward_mean": "reward",
    "turns_mean": "turns",
    "gradient_norm": "gradient",
    "dropped_fraction": "dropped",
    "eps_low": "ε low",
    "eps_high": "ε high",
    "off_support": "off set",
    "mean_high": "mean ≤",
    "low": "≥",
    "high": "≤",
    "state_shift": "shift",
    "ratio_drift": "r - 1",
    "gspo_gap": "G",
}


def print_table(frame: "pl.DataFrame", title: str) -> None:
    """Print a frame; columns that hold nothing but NaN are left out."""
    shown = [name for name in frame.columns if not _is_empty(frame[name])]
    table = Table(
        title=title,
        title_justify="left",
        box=box.HORIZONTALS,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for name in shown:
        table.add_column(_HEADINGS.get(name, name), justify="right", no_wrap=True)
    for row in frame.select(shown).iter_rows():
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else f"{cell}" for cell in row))
    console.print(table)


def _is_empty(column: "pl.Series") -> bool:
    """Whether a column holds nothing but NaN, as kept-set sizes do under full support."""
    return column.dtype.is_float() and bool(column.is_nan().all())
