"""The report of `forebay profile` in a real browser without a network."""

import itertools
import time
from pathlib import Path

from plotly.offline import get_plotlyjs

from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.report import ProfileReport
from forebay.telemetry.render.page import page
from tests.browser.conftest import Tab
from tests.telemetry.planted_trace import PlantedTrace
from tests.telemetry.report_kit import HOSTILE, hostile_report, make_report

VISIBLE = "[...document.querySelectorAll('.chart')].filter((chart) => chart.checkVisibility())"
DRAWN = "chart.dataset.drawn && chart.querySelector('.main-svg')"
MARKS = ".querySelectorAll('path.js-line, .bars path, .scatterlayer path').length"


def open_file(tab: Tab, file: Path) -> float:
    """Load it; the seconds until its first picture is drawn."""
    began = time.monotonic()
    tab.page.goto(file.as_uri())
    tab.page.locator("[data-drawn]").first.wait_for(state="attached")
    return time.monotonic() - began


def open_page(tab: Tab, folder: Path, report: ProfileReport, others: list[ProfileReport] | None = None) -> None:
    file = folder / "report.html"
    file.write_text(page(report, others or []), encoding="utf-8")
    open_file(tab, file)


def draw_all(tab: Tab) -> list[str]:
    """Scroll past every chart that is not hidden, and wait for each; their names."""
    number = tab.page.evaluate(f"{VISIBLE}.length")
    for index in range(number):
        tab.page.evaluate(f"{VISIBLE}[{index}].scrollIntoView()")
        tab.wait_for(f"((chart) => {DRAWN})({VISIBLE}[{index}])")
    names: list[str] = tab.page.evaluate(f"{VISIBLE}.map((chart) => chart.dataset.figure)")
    return names


def test_every_chart_is_drawn_without_a_network_or_an_error(tab: Tab, tmp_path: Path) -> None:
    open_page(tab, tmp_path, make_report(), [make_report(6, source="run-other")])
    names = draw_all(tab)
    assert {"overview_duration", "over_steps", "cdf_per_step", "compared"} <= set(names)
    assert {name.partition("-")[0] for name in names} >= {"lanes", "req_analysis_and_cdf", "critical_path"}
    assert tab.page.evaluate(f"{VISIBLE}.filter((chart) => !chart{MARKS}).map((chart) => chart.dataset.figure)") == []
    tab.assert_quiet()


def test_one_gets_from_a_finding_to_its_request_and_from_a_bar_to_its_step(tab: Tab, tmp_path: Path) -> None:
    open_page(tab, tmp_path, make_report())
    tab.page.evaluate("document.querySelector('#findings a[href^=\"#request\"]').click()")
    tab.wait_for("document.querySelector('details').open")
    tab.wait_for(f"((chart) => {DRAWN})(document.querySelector('details .chart'))")
    shown = "[...document.querySelectorAll('.step')].filter((step) => step.offsetParent).map((step) => step.id)"
    assert tab.page.evaluate(shown) == ["step-4"]
    tab.page.evaluate("document.querySelector('#steps').value = 'step-2'")
    tab.page.evaluate("document.querySelector('#steps').dispatchEvent(new Event('change'))")
    tab.wait_for("location.hash === '#step-2'")
    tab.wait_for(f"{shown}[0] === 'step-2'")
    names = draw_all(tab)
    assert "critical_path-step-2" in names
    tab.page.evaluate(
        """(() => { const chart = document.querySelector('[data-figure="overview_duration"]');
        chart.emit('plotly_click', {points: [{customdata: 'step-6'}]}); })()"""
    )
    tab.wait_for(f"{shown}[0] === 'step-6'")
    tab.assert_quiet()


def test_charts_can_be_zoomed_and_pointed_at(tab: Tab, tmp_path: Path) -> None:
    open_page(tab, tmp_path, make_report())
    chart = "document.querySelector('[data-figure=\"overview_duration\"]')"
    tab.page.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")
    tab.wait_for(f"{chart}.dataset.drawn")
    left, top, width, height = tab.page.evaluate(
        f"""(() => {{ const box = {chart}.querySelector('.nsewdrag').getBoundingClientRect();
        return [box.left, box.top, box.width, box.height]; }})()"""
    )
    mouse = tab.page.mouse
    mouse.move(left + width * 0.3, top + height * 0.9)
    tab.wait_for(f"{chart}.querySelector('.hoverlayer .hovertext')")
    before = tab.page.evaluate(f"{chart}.layout.xaxis.range")
    mouse.move(left + width * 0.2, top + height * 0.3)
    mouse.down()
    mouse.move(left + width * 0.5, top + height * 0.7, steps=3)
    mouse.up()
    tab.wait_for(f"{chart}.layout.xaxis.range[1] - {chart}.layout.xaxis.range[0] < {before[1] - before[0]} / 2")
    tab.assert_quiet()


def test_a_column_is_sorted_by_its_header(tab: Tab, tmp_path: Path) -> None:
    open_page(tab, tmp_path, make_report())
    is_wanted = "each.tHead.textContent.startsWith('stepsecondstraining')"
    table = f"[...document.querySelectorAll('table')].find((each) => {is_wanted})"
    values = f"[...{table}.tBodies[0].rows].map((row) => parseFloat(row.cells[1].textContent))"
    for expected_reverse in (True, False):
        tab.page.evaluate(f"{table}.tHead.rows[0].cells[1].click()")
        found = tab.page.evaluate(values)
        assert found == sorted(found, reverse=expected_reverse)
    assert len(set(found)) > 1


def test_texts_of_strangers_stay_texts(tab: Tab, tmp_path: Path) -> None:
    open_page(tab, tmp_path, hostile_report(), [hostile_report()])
    tab.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    draw_all(tab)
    assert HOSTILE in tab.page.evaluate("document.querySelector('h1').textContent")
    assert (
        tab.page.evaluate("document.querySelectorAll('svg script, td script, p script, a[href^=javascript]').length")
        == 0
    )
    # Plotly writes them letter by letter, too.
    assert any(
        "<script>" in text
        for text in tab.page.evaluate(
            "[...document.querySelectorAll('.legendtext, .xtick')].map((each) => each.textContent)"
        )
    )
    tab.assert_quiet()


def plant(folder: Path, num_steps: int) -> Path:
    """A trace of 2,000 spans a step: 50 rollouts, each with an attempt, 13 turns of engine and tool, and a reward."""
    trace = PlantedTrace(folder)
    run, server = trace.file("run"), trace.file("server", pid=8)
    for step in range(num_steps):
        begin = 100.0 * step
        groups = [f"g{step}-{number}" for number in range(10)]
        for group, slot in itertools.product(groups, range(5)):
            uid, engine = f"{group}/{slot}", f"http://e{slot % 4}"
            attempt = run.span("attempt", begin, begin + 60 + slot, uid, group=group)
            for turn in range(13):
                at = begin + 4 * turn
                span = run.span("turn", at, at + 4, uid, up=attempt, turn=turn, group=group)
                run.span("engine", at, at + 3, uid, up=span, turn=turn, group=group, engine=engine, sampled=30)
                run.span("tool", at + 3, at + 4, uid, up=span, turn=turn, group=group)
            run.rollout(uid, begin, begin + 60 + slot, id_=attempt, engine=engine, has_spans=True, sampled=390)
        for group in groups:
            server.group(group, "ready", begin + 65, last=f"{group}/4")
        server.read(begin + 30, begin + 65, begin + 66, groups, step=step, by=groups[-1])
    return folder


def test_two_hundred_thousand_spans_open_nearly_as_fast_as_two_thousand(tab: Tab, tmp_path: Path) -> None:
    files = {}
    for name, num_steps in (("short", 1), ("long", 100)):
        report = analyse(load(plant(tmp_path / name, num_steps)))
        assert report.num_requests == 50 * num_steps
        files[name] = tmp_path / f"{name}.html"
        files[name].write_text(page(report), encoding="utf-8")
    library = len(get_plotlyjs().encode())
    assert files["long"].stat().st_size - library <= 3_000_000
    times: dict[str, list[float]] = {name: [] for name in files}
    for _ in range(4):
        for name, file in files.items():
            times[name].append(open_file(tab, file))
    ratio = min(times["long"]) / min(times["short"])
    assert ratio <= 3, times
    tab.assert_quiet()
