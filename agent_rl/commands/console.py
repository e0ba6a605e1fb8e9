"""Output of every command: lines, tables, and one sentence for a user's mistake."""

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Report errors that the user can fix in one sentence, with exit code 2; our own bugs keep their traceback."""
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
    """Whether Ray itself raised it, as when an actor died or the object store is full."""
    return type(error).__module__.startswith("ray.")


def _sentence(error: BaseException) -> str:
    """The sentence for an error. If an actor died while it was created, Ray's text ends with the reason."""
    text = str(error).strip()
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"a disk that is written to is full{f', at {error.filename}' if error.filename else ''}; free some space"
    if not _from_ray(error):
        return text
    if type(error).__name__ in ("ObjectStoreFullError", "OutOfDiskError"):
        return (
            "Ray's object store is full, and there is no room on the disk it spills to (/tmp/ray unless Ray was told "
            "otherwise); free some space there, or use a Ray with a larger --object-store-memory by ray.address"
        )
    lines = text.splitlines()
    return lines[-1].strip() if "creation task" in lines[0] else f"{type(error).__name__}: {lines[0].rstrip('.')}"


_HEADINGS = {
    "mean_abs_d": "mean |d|",
    "gate_rate": "gate",
    "clip_fraction": "clip",
    "kept_size": "kept",
    "lag_mean": "lag",
    "num_turns": "turns of episode",
    "kl_bin": "k3",
    "half": "first/later",
    "pearson_logp_step_mean": "Pearson*",
    "pearson_p_step_mean": "Pearson p*",
    "step_mean": "mean",
    "step_min": "min",
    "step_max": "max",
    "policy_lag": "policy",
    "implementation": "impl.",
    "stop_reason": "stop reason",
    "reward_mean": "reward",
    "turns_mean": "mean turns",
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


def print_table(frame: "pl.DataFrame", title: str, optional: Sequence[str] = ()) -> None:
    """Print a frame; columns that hold nothing but NaN are left out.

    On a terminal that is too narrow the `optional` columns go, first ones first, and a line names them.
    """
    cells = {name: [_cell(value) for value in frame[name]] for name in frame.columns if not _is_empty(frame[name])}
    left_out = _drop_until_it_fits(cells, optional) if console.is_terminal else []
    table = Table(
        title=title,
        title_justify="left",
        box=box.HORIZONTALS,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for name in cells:
        table.add_column(_HEADINGS.get(name, name), justify="right", no_wrap=True)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    # A file or a pipe has no width: nothing is cut there.
    wide = console if console.is_terminal else Console(width=max(_width(cells), len(title), 80))
    wide.print(table)
    if left_out:
        say(f"not shown, for want of width: {', '.join(_HEADINGS.get(name, name) for name in left_out)}")
    if any(name.startswith("pearson") for name in cells):
        say("* mean over steps")


def _drop_until_it_fits(cells: dict[str, list[str]], optional: Sequence[str]) -> list[str]:
    return [name for name in optional if _width(cells) > console.width and cells.pop(name, None) is not None]


def _width(cells: Mapping[str, Sequence[str]]) -> int:
    """Columns of a terminal that the table takes."""
    longest = [max(map(len, [_HEADINGS.get(name, name), *column])) for name, column in cells.items()]
    return sum(longest) + 2 * len(longest) + 1


def _cell(value: object) -> str:
    """Three digits, and `7.1e-4` rather than `0.000713`: columns stay narrow."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value}"
    if 0 < abs(value) < 1e-2:
        digits, _, exponent = f"{value:.1e}".partition("e")
        return f"{digits}e{int(exponent)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _is_empty(column: "pl.Series") -> bool:
    """Whether a column holds nothing, as kept-set sizes do under full support."""
    return column.dtype.is_float() and column.fill_nan(None).null_count() == len(column)
