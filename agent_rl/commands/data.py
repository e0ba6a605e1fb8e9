"""`agent-rl data check`: finds faults in a config's prompts before a run starts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say

if TYPE_CHECKING:
    from agent_rl.config import RunConfig
    from agent_rl.data.check import Finding, Lengths

data = typer.Typer(help="Look at the prompts of a config.", no_args_is_help=True)


@data.callback()
def _data() -> None:
    """Keeps `check` a command of its own: typer would fold a single one into its parent."""


@data.command()
def check(
    config: Annotated[Path, typer.Argument(help="A run config")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides such as prompts.path=problems.jsonl")] = None,
    overlay: Annotated[list[Path] | None, typer.Option(help="File whose keys are laid over the config's")] = None,
) -> None:
    """Check training and held-out prompts; exit code 2 if a run with them would be wrong."""
    with one_sentence_errors():
        from agent_rl.config import load
        from agent_rl.data.check import OVERLAP

        findings = _findings(load(config, overrides, overlays=overlay))
    import polars as pl

    rows = [
        {"source": f.source, "check": f.check, "level": f.level, "count": f"{f.count} of {f.total}"} for f in findings
    ]
    print_table(pl.DataFrame(rows), "")
    for finding in findings:
        if finding.level == "ok" and finding.check not in ("prompts", OVERLAP):
            continue
        say(f"{finding.source}, {finding.check}: {finding.detail}")
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(2)


def _findings(config: "RunConfig") -> "list[Finding]":
    from agent_rl.data.check import check_overlap, check_prompts, prompts_of
    from agent_rl.run import build_prompts

    train, heldout = build_prompts(config)
    lengths = _lengths(config)
    trained, whole = prompts_of(train)
    tested, _ = prompts_of(heldout, config.eval.num_prompts)
    about_eval = check_prompts("eval", tested, True, lengths)
    return [*check_prompts("train", trained, whole, lengths), *about_eval, check_overlap(trained, tested, whole)]


def _lengths(config: "RunConfig") -> "Lengths":
    """How prompts are measured: as the rollout renders them, tool schemas included."""
    from agent_rl import registry
    from agent_rl.data.check import Lengths
    from agent_rl.records import Prompt
    from agent_rl.rollout.renderer import Renderer

    renderer = Renderer(config.model.directory)
    schemas = [registry.find("tool", tool.type).schema() for tool in config.rollout.tools]
    unknown = renderer.tokenizer.unk_token_id

    def measure(prompt: Prompt) -> tuple[int, int]:
        ids = renderer.prompt(prompt.messages, schemas, f"prompt {prompt.index}")
        return len(ids), int((ids == unknown).sum()) if unknown is not None else 0

    return Lengths(measure, config.rollout.max_episode_tokens)
