"""The report in a real browser: charts, tables and viewer work, nothing is fetched, and model text stays text."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from agent_rl.analysis import report
from agent_rl.analysis.recorded import RecordedRun, open_runs
from agent_rl.analysis.views import view
from agent_rl.cli import app
from tests.chromium import EXECUTABLE, Page

EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 2'><b>&amp;"

browser = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium here: apt-get install chromium")


def poison(run: Path) -> None:
    """What a model, a tool or a data set may write, in every text of every episode."""
    for part in (run / "rollout_facts.parquet").glob("*.parquet"):
        rows = pl.read_parquet(part)
        turn = pl.element().struct.with_fields(
            pl.lit([EVIL]).alias("tool_results"),
            pl.lit(json.dumps([[EVIL, {"code": EVIL}, EVIL]])).alias("tool_calls"),
        )
        rows = rows.with_columns(
            pl.lit(json.dumps([{"role": EVIL, "content": EVIL}])).alias("messages"),
            pl.lit(EVIL).alias("answer"),
            pl.lit(json.dumps({EVIL: EVIL})).alias("tags"),
            pl.lit(json.dumps({EVIL: 1.0})).alias("reward_parts"),
            pl.lit(EVIL).alias("stop_reason"),
            pl.col("turns").list.eval(turn),
        )
        rows.write_parquet(part)


@pytest.fixture(scope="module")
def page(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The report of a run, open in a browser."""
    folder = tmp_path_factory.mktemp("report")
    report.write_report(open_runs([recorded]), folder / "report.html")
    assert (folder / "report.html").stat().st_size < 10e6
    with Page(folder / "profile") as opened:
        seconds = opened.open(f"file://{folder}/report.html", "document.body?.dataset.drawn")
        print(f"opened in {seconds:.1f} s")
        yield opened


def count(page: Page, selector: str) -> int:
    return int(page.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))


@browser
def test_every_chart_is_drawn_with_titles_and_units(page: Page, recorded: Path) -> None:
    charts = view(open_runs([recorded]))["charts"]
    assert {chart["id"] for chart in charts} >= {"reward", "lag", "turns-0", "q", "radii", "kept_size", "time"}
    assert count(page, ".plot .main-svg") >= len(charts) == count(page, ".chart")
    titles = page.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.xtitle,.ytitle').length)"
    )
    assert titles == [2] * len(charts)
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file://", "data:", "blob:"))] == []


@browser
def test_a_legend_entry_hides_its_curve(page: Page) -> None:
    drawn = "document.querySelectorAll('#plot-lag .scatter').length"
    assert page.evaluate(drawn) == 2
    page.evaluate("document.querySelector('.chart:has(#plot-lag) .key button').click()")
    page.wait_for(f"{drawn} === 1")
    page.evaluate("document.querySelector('.chart:has(#plot-lag) .key button').click()")
    page.wait_for(f"{drawn} === 2")


@browser
def test_the_viewer_moves_and_colours(page: Page, recorded: Path) -> None:
    episodes = report.episodes(RecordedRun(recorded), report.MAX_EPISODES)["episodes"]
    heading = "document.querySelector('.episode h3').textContent"
    assert count(page, ".list button") == len(episodes)
    page.evaluate("location.hash = '#episode=3&color=lag'")
    page.wait_for(f"{heading} === 'Episode {episodes[3]['id']}'")
    assert page.evaluate("document.querySelector('#viewer').dataset.mode") == "version"
    sampled = sum(len(s["tok"]) for s in episodes[3]["segments"] if s["sampled"])
    assert count(page, ".turn .t") == sampled
    page.evaluate("document.querySelector('[data-move=\"1\"]').click()")
    assert page.evaluate(heading) == f"Episode {episodes[4]['id']}"
    page.evaluate("document.querySelector('[data-move=\"-1\"]').click()")
    assert page.evaluate(heading) == f"Episode {episodes[3]['id']}"
    page.evaluate("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))")
    assert page.evaluate(heading) == f"Episode {episodes[4]['id']}"
    assert page.evaluate("location.hash") == "#episode=4&color=version"
    assert page.errors == []


@browser
def test_each_colour_shows_its_own_values(page: Page, recorded: Path) -> None:
    sample = report.episodes(RecordedRun(recorded), report.MAX_EPISODES)["episodes"]
    number = max(range(len(sample)), key=lambda i: sample[i]["max_abs_d"])
    page.evaluate(f"location.hash = '#episode={number}&color=d'")
    page.wait_for(f"document.querySelector('.episode h3').textContent === 'Episode {sample[number]['id']}'")
    heats = "[...document.querySelectorAll('.turn .t')].map(t => Number(t.style.getPropertyValue('--h')))"
    values = [abs(d) for s in sample[number]["segments"] if s["sampled"] for d in s["d"]]
    by_mode = {}
    for mode in ("d", "logprob", "entropy", "kept"):
        page.evaluate(f"document.querySelector('[data-mode={mode}]').click()")
        by_mode[mode] = page.evaluate(heats)
    assert by_mode["d"][values.index(max(values))] == max(by_mode["d"]) > 0.5
    assert len({tuple(heat) for heat in by_mode.values()}) == 4
    page.evaluate("document.querySelector('[data-mode=clip]').click()")
    states = [state for s in sample[number]["segments"] if s["sampled"] for state in s["state"]]
    for state in range(1, 5):
        assert count(page, f".turn .t.s{state}") == states.count(state)


@browser
def test_hovering_shows_the_token(page: Page, recorded: Path) -> None:
    episode = report.episodes(RecordedRun(recorded), report.MAX_EPISODES)["episodes"][3]
    page.evaluate("location.hash = '#episode=3&color=d'")
    page.wait_for(f"document.querySelector('.episode h3').textContent === 'Episode {episode['id']}'")
    page.evaluate("document.querySelector('.turn .t').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))")
    tip = str(page.evaluate("document.querySelector('.tip').innerText"))
    version = next(s for s in episode["segments"] if s["sampled"])["ver"][0]
    assert re.search(rf"version\s+{version} \(lag {episode['step'] - version}\)", tip)
    assert "behaviour μ" in tip


@browser
def test_filters_narrow_the_list(page: Page, recorded: Path) -> None:
    episodes = report.episodes(RecordedRun(recorded), report.MAX_EPISODES)["episodes"]
    select = "[...document.querySelectorAll('.filters label')].find(l => l.textContent.startsWith('Step')).lastChild"
    page.evaluate(f"(() => {{ const s = {select}; s.value = '2'; s.dispatchEvent(new Event('change')); }})()")
    assert count(page, ".list button") == sum(e["step"] == 2 for e in episodes) < len(episodes)
    page.evaluate(f"(() => {{ const s = {select}; s.value = ''; s.dispatchEvent(new Event('change')); }})()")
    assert count(page, ".list button") == len(episodes)


@browser
def test_what_models_and_tools_write_stays_text(run: Path, tmp_path: Path) -> None:
    poison(run)
    hostile = run.with_name("a<b>&'\"")
    run.rename(hostile)
    report.write_report(open_runs([hostile]), tmp_path / "report.html", num_episodes=4)
    with Page(tmp_path / "profile") as page:
        page.open(f"file://{tmp_path}/report.html#episode=1&color=d", "document.body?.dataset.drawn")
        assert page.evaluate("window.evil") is None
        assert count(page, "main img, main b b, main script") == 0
        text = str(page.evaluate("document.querySelector('.episode').textContent"))
        assert text.count(EVIL) >= 5
        assert page.evaluate("document.querySelector('h1').textContent") == hostile.name
        assert page.errors == []


@browser
def test_several_runs_share_one_report(recorded: Path, run: Path, tmp_path: Path) -> None:
    target = tmp_path / "both.html"
    result = CliRunner().invoke(app, ["report", str(recorded), str(run), "--output", str(target), "--episodes", "6"])
    assert result.exit_code == 0, result.output
    with Page(tmp_path / "profile", width=400) as page:
        page.size(400, 900, dark=True)
        page.open(f"file://{target}", "document.body?.dataset.drawn")
        assert page.evaluate("document.querySelector('h1').innerText.split(/\\s+/)") == ["short", "run"]
        assert count(page, ".run") == 2
        assert count(page, "#plot-lag .scatter") == 4
        assert count(page, ".is-heatmap") == 2
        assert page.evaluate("document.documentElement.scrollWidth") <= 400  # nothing sticks out of a phone
        page.evaluate("location.hash = '#episode=0&run=1'")
        page.wait_for("document.querySelector('.filters select').value === '1'")
        assert page.errors == []


def test_data_in_the_page_cannot_end_its_element() -> None:
    text = report.embed({"x": EVIL + "\u2028"})
    assert "<" not in text
    assert json.loads(text) == {"x": EVIL + "\u2028"}
    assert report.script("a = '</script>'") == "a = '<\\/script>'"


def test_a_report_without_episodes_or_with_a_first_step_only(run: Path, tmp_path: Path) -> None:
    for table in ("training_facts.parquet", "rollout_facts.parquet"):
        for part in (run / table).glob("*"):
            part.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.write_report(open_runs([run]), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert '"episodes":[]' in text
    assert "http-equiv" in text


def test_curves_of_long_runs_are_thinned_to_their_last_point() -> None:
    from agent_rl.analysis.drawing import thin

    x, y = thin([(step, step / 3) for step in range(10_001)])
    assert len(x) <= 601
    assert (x[0], x[-1]) == (0, 10_000)
    assert y[-1] == 3333.33
