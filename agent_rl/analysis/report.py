"""report.html: one file that shows one run or several, readable offline. Reads files only.

It asks for nothing over the network: scripts, styles and data are in it, and its content security policy forbids
the rest. What models and tools wrote is data in it, never markup.
"""

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from agent_rl.analysis.episodes import sample
from agent_rl.analysis.recorded import RecordedRun
from agent_rl.analysis.views import finite, view

MAX_EPISODES = 48
_MAX_TOKENS = 120_000
"""Tokens of the sampled episodes together, about 4 MB of the file."""

STYLES = ("page.css", "episodes.css")
SCRIPTS = ("charts.js", "tables.js", "episodes.js")


def write_report(runs: Sequence[RecordedRun], target: Path, num_episodes: int = MAX_EPISODES) -> None:
    """Write the report of `runs` to `target`, with up to `num_episodes` episodes together."""
    share = max(num_episodes // len(runs), 1) if num_episodes else 0
    samples = [episodes(run, share, _MAX_TOKENS // len(runs)) for run in runs]
    write_page(title(runs), view(runs) | {"samples": samples}, target)


def write_page(name: str, data: dict[str, Any], target: Path) -> None:
    """Write the page that shows `data`: what `views.view` gives, and `samples` of episodes."""
    pieces = {
        "title": html.escape(name),
        "css": "\n".join(asset(name) for name in STYLES),
        "plotly": script(plotly()),
        "scripts": "\n".join(script(asset(name)) for name in (*SCRIPTS, "report.js")),
        "data": embed(data),
    }
    before, *rest = asset("report.html").split("{{")
    text = before + "".join(pieces[key] + more for key, _, more in (part.partition("}}") for part in rest))
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(target)


def title(runs: Sequence[RecordedRun]) -> str:
    return " · ".join(run.name for run in runs[:4]) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")


def episodes(run: RecordedRun, most: int, most_tokens: int = _MAX_TOKENS) -> dict[str, Any]:
    """The sample that the viewer of a page shows of one run."""
    sampled = sample(run, most, most_tokens) if most else None
    nothing: dict[str, Any] = {"episodes": [], "texts": [], "num_recorded": 0, "notes": []}
    return {"name": run.name} | (finite(sampled.as_json()) if sampled else nothing)


def embed(data: Any) -> str:
    """JSON that may stand in a script element: no `<`, so that no text in it can close the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def script(text: str) -> str:
    """A script that may stand in a script element: in its strings, `<\\/` is `</`."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def asset(name: str) -> str:
    """The text of a file of the pages."""
    return (resources.files("agent_rl") / "assets" / "report" / name).read_text(encoding="utf-8")


def plotly() -> str:
    """plotly.js, as the Python package brings it."""
    from plotly.offline import get_plotlyjs  # heavy

    return str(get_plotlyjs())
