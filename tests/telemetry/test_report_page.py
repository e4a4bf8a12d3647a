"""The report as one page: everything in it, escaped, and nothing loaded from anywhere."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from html import unescape
from typing import Any

import pytest

from forebay.core.errors import MissingExtra
from forebay.telemetry.analysis.lanes import MOST_PIECES, MOST_STEPS
from forebay.telemetry.analysis.report import ProfileReport
from forebay.telemetry.render.markdown import markdown
from forebay.telemetry.render.page import page
from tests.telemetry.report_kit import HOSTILE, hostile_report, make_report

PICTURES = (
    "cdf_per_step",
    "overview_duration",
    "over_steps",
    "lanes",
    "critical_path",
    "req_analysis_and_cdf",
    "event_percentage_step",
)
SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)


def figures_of(text: str) -> dict[str, Any]:
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    figures: dict[str, Any] = json.loads(data[1])
    return figures


def without_scripts(text: str) -> str:
    return SCRIPT.sub("", text)


@pytest.fixture(scope="module")
def rendered() -> str:
    return page(make_report(), [make_report(6, source="run-other")])


def test_every_picture_is_a_section_with_data_that_plotly_takes(rendered: str) -> None:
    from plotly.graph_objects import Figure

    figures = figures_of(rendered)
    for picture in PICTURES:
        assert [name for name in figures if name.partition("-")[0] == picture], picture
    for name, chart in figures.items():
        assert Figure(chart).data, name
        assert f'data-figure="{name}"' in rendered


def test_the_script_of_the_charts_stands_in_it_once(rendered: str) -> None:
    from plotly.offline import get_plotlyjs

    assert rendered.count(get_plotlyjs()) == 1
    assert len(SCRIPT.findall(rendered)) == 3


def test_nothing_is_loaded_and_no_other_script_would_run(rendered: str) -> None:
    static = without_scripts(rendered)
    assert not re.findall(r"\bsrc=|@import|url\(", static)
    assert {link[:1] for link in re.findall(r'href="([^"]*)"', static) if link != "data:,"} == {"#"}
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', rendered)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    runnable = [script for script in SCRIPT.findall(rendered) if not script.startswith("{")]
    for script in runnable:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    assert "'unsafe-inline'" not in policy[1].partition("style-src")[0]


def test_findings_come_first_and_the_costliest_before_the_others(rendered: str) -> None:
    static = without_scripts(rendered)
    sections = re.findall(r'<section id="([^"]+)"', static)
    assert sections[0] == "findings"
    assert static.index("stood 150 s in the engine") < static.index("Rewards took 31.5 s")


def test_one_gets_from_a_finding_down_to_the_event(rendered: str) -> None:
    static = without_scripts(rendered)
    where = re.search(r'<a href="#(request-\d+)">(step 4 [^<]*)</a>', static)
    assert where is not None
    path = ["step 4", "worker http://10.0.0.0:30000", "group g-17", "request uid-slow", "turn 2", "engine"]
    assert unescape(where[2]).split(" → ") == path
    request = static.partition(f'<details id="{where[1]}">')[2].partition("</details>")[0]
    assert "uid-slow" in request
    assert f'data-figure="timeline-{where[1]}"' in request
    timeline = figures_of(rendered)[f"timeline-{where[1]}"]["data"]
    engine = next(bars for bars in timeline if bars["name"] == "engine")
    assert (engine["base"], engine["x"], engine["y"]) == ([0, 23], [20, 150], ["turn 1", "turn 2"])


def test_the_step_of_the_costliest_finding_is_the_one_that_is_shown(rendered: str) -> None:
    assert re.findall(r"selected>([^<]*)<", rendered) == ["4"]


def test_compared_runs_stand_side_by_side(rendered: str) -> None:
    table = without_scripts(rendered).partition('<section id="compare">')[2].partition("</section>")[0]
    assert re.search(r"<th[^>]*>run-20260101-sums</th><th[^>]*>run-other</th>", table)
    assert re.search(r"<td>steps</td><td[^>]*>8</td><td[^>]*>6</td>", table)
    assert re.search(r"<p>run-other: [\d.]+ s \w+ a step than run-20260101-sums", table)
    chart = figures_of(rendered)["compared"]
    first = [line for line in chart["data"] if line["xaxis"] == "x"]
    assert chart["layout"]["annotations"][0]["text"].startswith("<b>Duration of a step</b>, seconds<br>")
    assert [line["name"] for line in first] == ["run-20260101-sums", "run-other"]
    assert first[0]["x"] == first[1]["x"] == [str(number) for number in range(8)]
    assert first[1]["y"][6:] == [None, None]


def test_runs_of_one_name_are_told_apart() -> None:
    text = page(make_report(2), [make_report(2)])
    names = {line["name"] for line in figures_of(text)["compared"]["data"]}
    assert names == {"run-20260101-sums (1)", "run-20260101-sums (2)"}


def test_a_step_begins_with_its_requests_over_time_by_engine(rendered: str) -> None:
    step = without_scripts(rendered).partition('<section id="step-4"')[2]
    assert re.findall(r'data-figure="([^"]+)"', step)[0] == "lanes-step-4"
    chart = figures_of(rendered)["lanes-step-4"]
    rows = chart["layout"]["yaxis"]["ticktext"]
    engines = [f"<b>http://10.0.0.{index}:30000</b>" for index in range(4)]
    assert [row for row in rows if row.startswith("<b>http")] == engines
    assert rows[:3] == [engines[0], "<b>▶ uid-slow</b>", "uid-4-1"]
    data = {each["name"]: each for each in chart["data"]}
    assert list(data) == ["engine", "tool", "reward", "waited for last", "in flight"]
    assert data["engine"]["marker"] != data["tool"]["marker"]
    in_row = [at for at, row in enumerate(data["tool"]["y"]) if row == 1]
    ends = [data["tool"]["base"][at] + data["tool"]["x"][at] for at in in_row]
    assert len(ends) == 3
    assert data["reward"]["base"][data["reward"]["y"].index(1)] == pytest.approx(ends[-1], rel=1e-4)
    assert data["waited for last"]["y"] == [1]
    assert (data["in flight"]["y"][0], data["in flight"]["y"][-1]) == (64, 0)
    # The number of requests in flight is below, at the same times.
    assert (data["in flight"]["yaxis"], chart["layout"]["xaxis"]["anchor"]) == ("y2", "y2")
    assert chart["layout"]["yaxis2"]["domain"][1] < chart["layout"]["yaxis"]["domain"][0]


def test_the_worst_engine_of_each_column_is_marked(rendered: str) -> None:
    table = without_scripts(rendered).partition('<section id="engines">')[2].partition("</section>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)[1:]]
    assert rows[0][3:] == ["50", "<strong>1.9 s</strong>", "3 ms", "<strong>12 %</strong>"]
    assert "<strong>" not in str(rows[1:])
    assert "queue of a call" not in table
    assert "| **1.9 s** |" in markdown(make_report())


def test_figures_of_all_steps_are_small_pictures_over_the_same_steps(rendered: str) -> None:
    chart = figures_of(rendered)["over_steps"]
    layout = chart["layout"]
    titles = [re.sub("<.*?>", "", each["text"].partition("<br>")[0]) for each in layout["annotations"]]
    assert titles[:2] == ["Waiting at the barrier, by worker, seconds", "Requests, by worker, requests"]
    assert {"Throughput, tokens/s", "Length of answers, tokens", "Rewards, mean"} <= set(titles)
    assert layout["grid"]["rows"] * layout["grid"]["columns"] >= len(titles)
    axes = {line["xaxis"] for line in chart["data"]}
    assert len(axes) == len(titles)
    assert all(layout[f"xaxis{axis[1:]}"]["matches"] == "x" for axis in axes)
    lengths = next(each["text"] for each in layout["annotations"] if "Length" in each["text"])
    assert [re.findall(r">([^<]+)</span>", lengths)] == [["min", "median", "mean", "p95", "max"]]


def test_a_share_says_of_what(rendered: str) -> None:
    static = without_scripts(rendered)
    assert "<td>31 % of step 4</td>" in static
    assert "<td>6 % of the run</td>" in static


@pytest.mark.parametrize("others", [[], [hostile_report()]], ids=["alone", "compared"])
def test_no_text_of_a_log_is_taken_for_html(others: list[ProfileReport]) -> None:
    text = page(hostile_report(), others)
    assert HOSTILE not in text
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    static = without_scripts(text)
    for place in ("<h1>run ", "<summary>uid|", "<h2>Step ", "<td>", "<p>", "<option"):
        assert re.search(rf"{re.escape(place)}[^<]*&lt;script&gt;", static), place
    labels = json.dumps(figures_of(text))
    assert "<script" not in labels
    assert "&lt;script&gt;" in labels


def test_no_text_of_a_log_is_taken_for_markdown() -> None:
    text = markdown(hostile_report())
    assert "<script" not in text.replace("\\<script", "")
    assert "uid\\|\\<script\\>" in text
    for line in text.splitlines():
        if line.startswith("| "):
            assert "](" not in line
    assert "\x1b" not in text


def test_markdown_has_the_findings_and_tables_of_the_page(rendered: str) -> None:
    text = markdown(make_report(), [make_report(6, source="run-other")])
    plain, static = text.replace("\\", ""), without_scripts(rendered)
    titles = [unescape(title) for title in re.findall(r"<h2>([^<]*)</h2>", static)]
    assert re.findall(r"^## (.*)$", plain, re.MULTILINE) == titles
    assert len(re.findall(r"^\| (?!---)", text, re.MULTILINE)) == static.count("<tr>")
    rows = [re.sub(r"<[^>]*>", "\t", row) for row in re.findall(r"<tr>(.*?)</tr>", static)]
    for row in rows:
        cells = [unescape(cell) for cell in row.split("\t") if cell]
        assert all(cell in plain for cell in cells), row


def test_a_thousand_steps_are_no_larger_than_three_megabytes() -> None:
    from plotly.offline import get_plotlyjs

    report = make_report(1000, num_workers=8, num_ends=256)
    for lane in (lane for step in report.lanes for lane in step.lanes):
        lane.pieces = [(("engine", "tool")[place % 2], 0.25 * place, 0.25) for place in range(MOST_PIECES)]
    text = page(report)
    assert len(text.encode()) - len(get_plotlyjs().encode()) <= 3_000_000
    assert "of 1,000 steps: those with findings, and the slowest" in text
    assert "The table has the 400 slowest of 1,000 steps." in text
    longest = max(len(line["y"]) for chart in figures_of(text).values() for line in chart["data"])
    assert longest <= 2500
    lanes = [chart["data"] for name, chart in figures_of(text).items() if name.startswith("lanes")]
    assert len(lanes) == MOST_STEPS
    assert {sum(len(bars["x"]) for bars in data if bars["type"] == "bar") for data in lanes} == {5000}


def test_a_request_of_many_events_shows_the_longest() -> None:
    report = make_report()
    many = [{"name": "tool", "begin_s": float(index), "seconds": 0.01 * index, "turn": 0} for index in range(5000)]
    report.outliers[0].events = many
    text = page(report)
    assert "Its turns and events: the 240 longest of 5,000; the export to Perfetto has all" in text
    bars = figures_of(text)["timeline-request-0"]["data"][0]
    assert len(bars["x"]) == 240
    assert max(bars["x"]) == pytest.approx(49.99)


def test_a_report_of_nothing_is_a_page_as_well() -> None:
    text = page(ProfileReport(source="run-empty"))
    assert "Nothing cost as much as 5 % of a step" in text
    assert re.findall(r'<section id="([^"]+)"', without_scripts(text)) == ["findings"]
    assert markdown(ProfileReport(source="run-empty")).startswith("# run-empty")


def test_without_the_extra_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.core.lazy_names.find_spec", lambda _: None)
    with pytest.raises(MissingExtra) as refused:
        page(make_report())
    assert refused.value.hint == "pip install 'forebay[report]'"
    assert markdown(make_report())


def test_markdown_needs_no_plotly() -> None:
    modules = "forebay.telemetry.render.markdown, forebay.telemetry.render.page"
    code = f"import sys, {modules}; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=60).returncode == 0


def test_columns_of_which_a_log_tells_nothing_are_left_out() -> None:
    report = make_report(3)
    for step in report.steps:
        step.train_s = step.wait_s = step.send_s = step.beyond_next_s = step.cache_hit_rate = None
    text = markdown(report)
    assert "| step | seconds | requests | used | shortest answer |" in text
    assert "cache hits" not in text
    assert "| step | seconds | training | waiting |" in markdown(make_report(3))
