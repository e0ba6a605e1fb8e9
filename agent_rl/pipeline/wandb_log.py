"""Logs the rows of metrics.jsonl to Weights & Biases if `logging.wandb` names a project."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_rl.config import RunConfig
from agent_rl.pipeline.figures import OnRow

ID_FILE = "wandb_id"


@contextmanager
def wandb_log(config: RunConfig, path: Path, on_row: OnRow) -> Iterator[OnRow]:
    """Yields a function that logs a row to W&B and then calls `on_row`; without a project, `on_row` itself.

    A resumed run continues its W&B run. The x-axis is `step`, so the steps that a resumed run repeats are drawn over
    the old ones. Raises `ValueError` if the package is missing or W&B cannot be reached.
    """
    if config.logging.wandb is None:
        yield on_row
        return
    run = _start(config, path)

    def log(row: dict[str, Any]) -> None:
        run.log({key: value for key, value in row.items() if _is_number(value)})
        on_row(row)

    try:
        yield log
    finally:
        run.finish()


def _start(config: RunConfig, path: Path) -> Any:
    try:
        import wandb  # optional
    except ImportError:
        raise ValueError(
            "logging.wandb is set, but the package wandb is not installed; "
            "install it with `pip install 'agent-rl[wandb]'` or set logging.wandb to null"
        ) from None
    known = path / ID_FILE
    try:
        run = wandb.init(
            project=config.logging.wandb,
            name=path.resolve().name,
            dir=str(path),
            id=known.read_text() if known.is_file() else None,
            resume="allow",
            mode=config.logging.wandb_mode,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True),
        )
    except wandb.Error as error:
        raise ValueError(
            f"W&B could not be started: {error}; log in with `wandb login` or set logging.wandb_mode to offline"
        ) from None
    known.write_text(run.id)
    run.define_metric("*", step_metric="step")
    return run


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
