"""The pictures as plotly data. Nothing here imports plotly: the page includes it and draws what becomes visible.

Plotly interprets texts as simple HTML, so every text from a log goes through ``label``.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from forebay.telemetry.analysis.report import CompletionCurve, Gap, OutlierRequest, PathPart, StepSummary, WhatIf
from forebay.telemetry.analysis.robust import thinned
from forebay.telemetry.numbers import MOST_POINTS, short, shortened
from forebay.telemetry.render.blocks import Chart
from forebay.telemetry.visible_text import visible

T = TypeVar("T")

LONGEST_LABEL = 48
MOST_BARS = 60
MOST_LINES = 24
"""Limit per picture: more lines cannot be told apart."""

COLOURS = {
    "engine": "#2f5d8a",
    "decode": "#4c78a8",
    "prefill": "#7ba6d0",
    "engine_queue": "#b5cde5",
    "engine_wait": "#8c8c8c",
    "tool": "#f58518",
    "environment": "#ffbf79",
    "agent": "#b279a2",
    "starting": "#dcc3d5",
    "reward": "#54a24b",
    "reward_queue": "#a5d49d",
    "retry": "#e45756",
    "queue": "#bab0ac",
    "admission": "#d8cfca",
    "hold": "#d6b4cd",
    "group": "#eeca3b",
    "write": "#9d755d",
    "train": "#b5b9bf",
    "wait": "#e45756",
    "send": "#72b7b2",
    "async_generate": "#4c78a8",
    "barrier_wait": "#e45756",
}
"""Each phase has the same colour in all pictures."""


def label(text: str) -> str:
    """A text from a log, escaped for plotly and shortened in the middle."""
    if len(text) > LONGEST_LABEL:
        text = f"{text[: LONGEST_LABEL // 2]}…{text[-LONGEST_LABEL // 2 :]}"
    return html.escape(visible(text).replace("\n", " "), quote=False)


def overview(steps: Sequence[StepSummary], anchors: Mapping[str, str]) -> Chart:
    """How long each step took, and for what. Outliers are marked. A click leads to the step."""
    steps = thinned(steps, MOST_POINTS)
    names = [label(step.name) for step in steps]
    links = [anchors.get(step.name, "") for step in steps]
    parts: dict[str, list[float | None]] = {
        "train": [step.train_s for step in steps],
        "wait": [step.wait_s for step in steps],
        "send": [step.send_s for step in steps],
    }
    known = [sum(value or 0.0 for value in values) for values in zip(*parts.values(), strict=True)]
    rest = [step.seconds - each for step, each in zip(steps, known, strict=True)]
    parts["step" if all(step.wait_s is None for step in steps) else "rest"] = [
        each if each > 0.001 * step.seconds else None for step, each in zip(steps, rest, strict=True)
    ]
    data = [_stacked(name, names, values) | {"customdata": links} for name, values in parts.items() if any(values)]
    marked = [
        (name, step.seconds, link) for name, step, link in zip(names, steps, links, strict=True) if step.is_outlier
    ]
    if marked:
        x, y, custom = (list(each) for each in zip(*marked, strict=True))
        marker = {"symbol": "triangle-down", "size": 11, "color": "#e45756"}
        data.append(
            {"type": "scatter", "mode": "markers", "name": "outlier", "x": x, "y": shortened(y), "marker": marker}
            | {"customdata": custom, "hovertemplate": "step %{x}: %{y} s, an outlier<extra></extra>"}
        )
    return _chart(data, x="step", y="seconds", is_by_step=True, barmode="stack")


def over_steps(steps: Sequence[StepSummary], lines: Mapping[str, Sequence[float | None]], unit: str) -> Chart:
    """One line over the steps for each name."""
    names = thinned([label(step.name) for step in steps], MOST_POINTS)
    data = [
        _line(name, names, thinned(values, MOST_POINTS))
        for name, values in _first(lines)
        if any(v is not None for v in values)
    ]
    return _chart(data, x="step", y=unit, is_by_step=True)


def runs_over_steps(runs: Mapping[str, Mapping[str, float | None]], unit: str) -> Chart:
    """One line over the steps for each run; steps of the same name share a position."""
    names = list(dict.fromkeys(name for line in runs.values() for name in line))
    kept = thinned(names, MOST_POINTS)
    data = [_line(run, [label(name) for name in kept], [line.get(name) for name in kept]) for run, line in _first(runs)]
    return _chart(data, x="step", y=unit, is_by_step=True)


def shares_over_steps(steps: Sequence[StepSummary], phases: Iterable[str]) -> Chart:
    """The share of each step's time spent in each phase; 100 in all."""
    kept = thinned(steps, MOST_POINTS)
    names = [label(step.name) for step in kept]
    data = [_stacked(phase, names, [step.phase_shares.get(phase, 0.0) for step in kept], "%") for phase in phases]
    return _chart(data, x="step", y="% of exclusive time", is_by_step=True, barmode="stack", bargap=0)


def counts_over_steps(steps: Sequence[StepSummary], counts: Mapping[str, Sequence[float | None]], unit: str) -> Chart:
    """Stacked bars over the steps."""
    names = thinned([label(step.name) for step in steps], MOST_POINTS)
    data = [_stacked(name, names, thinned(values, MOST_POINTS), unit) for name, values in _first(counts)]
    return _chart(data, x="step", y=unit, is_by_step=True, barmode="stack")


def completion(curves: Mapping[str, CompletionCurve], gaps: Sequence[Gap] = (), most: int = 2000) -> Chart:
    """The share of requests that had ended over time; gaps are shaded."""
    data = []
    for name, curve in _first(curves):
        ends = thinned(curve.ends_s, most)
        shares = [100 * (index + 1) / len(ends) for index in range(len(ends))]
        line = _line(name, shortened([0.0, *ends]), [0.0, *shares])
        hover = "%{y:.1f} % had ended after %{x} s<extra>%{fullData.name}</extra>"
        data.append(line | {"line": {**line["line"], "shape": "hv"}, "mode": "lines", "hovertemplate": hover})
    chart = _chart(data, x="seconds since the first request began", y="% of requests ended")
    chart["layout"]["shapes"] = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": short(gap.begin_s), "x1": short(gap.end_s)}
        | {"y0": 0, "y1": 1, "fillcolor": "#e45756", "opacity": 0.12, "line": {"width": 0}}
        for gap in gaps[:MOST_LINES]
    ]
    return chart


def workers(names: Sequence[str], busy_s: Sequence[float], barrier_s: Sequence[float]) -> Chart:
    """How long each worker of a step was at work, and how long it waited at the barrier."""
    labels = [label(name) for name in names]
    data = [_bars("at work", labels, busy_s), _bars("barrier", labels, barrier_s)]
    for each, colour in zip(data, (COLOURS["engine"], COLOURS["wait"]), strict=True):
        each["marker"] = {"color": colour}
    return _chart(data, x="worker", y="seconds", is_by_step=True, barmode="stack")


def outlier_phases(outliers: Sequence[OutlierRequest], links: Sequence[str]) -> Chart:
    """The phases of each outlier. A click leads to the request."""
    names = [f"{index + 1}. {label(each.request)}" for index, each in enumerate(outliers)]
    phases = _by_size(outlier.phases for outlier in outliers)
    data = []
    for phase in phases:
        bars = _bars(phase, names, [each.phases.get(phase, 0.0) for each in outliers])
        data.append(_lying(bars) | {"customdata": list(links)})
    chart = _chart(data, x="seconds", y="", barmode="stack", height=90 + 26 * max(4, len(outliers)))
    chart["layout"]["yaxis"] |= {"autorange": "reversed", "type": "category", "automargin": True}
    return chart


def request_timeline(events: Sequence[Mapping[str, object]]) -> Chart:
    """The events of one request, with a row for each turn."""
    rows = [(_row_of(event), str(event.get("name", "")), _seconds(event, "begin_s")) for event in events]
    lengths = [_seconds(event, "seconds") for event in events]
    data = []
    for phase in dict.fromkeys(name for _, name, _ in rows):
        own = [(row, at, d) for (row, name, at), d in zip(rows, lengths, strict=True) if name == phase]
        bars = _lying(_bars(phase, [row for row, _, _ in own], [d for _, _, d in own]))
        data.append(bars | {"base": shortened(at for _, at, _ in own)})
    order = list(dict.fromkeys(row for row, _, _ in rows))
    chart = _chart(data, x="seconds since the request began", y="", barmode="overlay", height=110 + 30 * len(order))
    chart["layout"]["yaxis"] |= {"categoryarray": order[::-1], "type": "category", "automargin": True}
    return chart


def critical_path(parts: Sequence[PathPart]) -> Chart:
    """What a step's data waited for, one stretch after another."""
    begin = parts[0].begin_s if parts else 0.0
    data = []
    for phase in dict.fromkeys(part.path.event for part in parts):
        own = [part for part in parts if part.path.event == phase]
        bars = _lying(_bars(phase, ["critical path"] * len(own), [part.seconds for part in own]))
        where = [label(f"{part.path.request or part.path.group} {turn_text(part.path.turn)}".strip()) for part in own]
        hover = "%{x} s<br>%{customdata}<extra>%{fullData.name}</extra>"
        bars |= {"base": shortened(part.begin_s - begin for part in own), "customdata": where, "hovertemplate": hover}
        data.append(bars)
    chart = _chart(data, x="seconds of the wait", y="", barmode="overlay", height=170)
    chart["layout"]["yaxis"] |= {"showticklabels": False}
    return chart


def what_if(choices: Sequence[WhatIf], unit: str) -> Chart:
    """What would be saved, and at what cost."""
    ordered = sorted(choices, key=lambda each: each.value)
    x = shortened(each.value for each in ordered)
    saved = _line("seconds saved per step", x, [each.saved_s for each in ordered])
    lost = _line("answers cut or thrown away, in total", x, [each.num_cut for each in ordered])
    chart = _chart([saved, lost | {"yaxis": "y2"}], x=unit, y="seconds saved per step")
    chart["layout"]["yaxis2"] = {
        "title": {"text": "answers"},
        "overlaying": "y",
        "side": "right",
        "showgrid": False,
    } | {"rangemode": "tozero"}
    return chart


def turn_text(turn: int | None) -> str:
    """The number of a turn for people, starting at 1."""
    return "" if turn is None else f"turn {turn + 1}"


def _row_of(event: Mapping[str, object]) -> str:
    turn = event.get("turn")
    return turn_text(turn) if isinstance(turn, int) else "outside turns"


def _seconds(event: Mapping[str, object], field: str) -> float:
    value = event.get(field)
    return float(value) if isinstance(value, int | float) else 0.0


def _by_size(phases: Iterable[Mapping[str, float]]) -> list[str]:
    totals: dict[str, float] = {}
    for each in phases:
        for name, seconds in each.items():
            totals[name] = totals.get(name, 0.0) + seconds
    return sorted(totals, key=lambda name: -totals[name])


def _first(lines: Mapping[str, T]) -> list[tuple[str, T]]:
    return list(lines.items())[:MOST_LINES]


def _line(name: str, x: Sequence[object], y: Iterable[float | None]) -> Chart:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 60 else "lines",
        "name": label(name),
        "x": list(x),
        "y": shortened(y),
        "line": _colour(name) | {"width": 2},
        "hovertemplate": "%{x}: %{y}<extra>%{fullData.name}</extra>",
    }


def _bars(name: str, x: Sequence[object], y: Iterable[float | None], unit: str = "s") -> Chart:
    hover = f"%{{x}}: %{{y}} {unit}<extra>%{{fullData.name}}</extra>"
    bars = {"type": "bar", "name": label(name), "x": list(x), "y": shortened(y), "hovertemplate": hover}
    return bars | {"marker": _colour(name)}


def _stacked(name: str, x: Sequence[object], y: Sequence[float | None], unit: str = "s") -> Chart:
    """Stacked bars, or areas if there would be too many bars to draw quickly."""
    bars = _bars(name, x, y, unit)
    if len(x) <= MOST_BARS:
        return bars
    area = {"type": "scatter", "mode": "lines", "stackgroup": "all", "line": _colour(name) | {"width": 0.5}}
    return {key: value for key, value in bars.items() if key != "marker"} | area


def _lying(bars: Chart) -> Chart:
    hover = "%{y}: %{x} s<extra>%{fullData.name}</extra>"
    return bars | {"x": bars["y"], "y": bars["x"], "orientation": "h", "hovertemplate": hover}


def _colour(name: str) -> dict[str, str | int]:
    """The phase's colour; without one, the page's palette is used."""
    own = COLOURS.get(name.removesuffix("_duration"))
    return {"color": own} if own else {}


def _chart(
    data: list[Chart], *, x: str, y: str, is_by_step: bool = False, height: int = 320, **layout: object
) -> Chart:
    x_axis: Chart = {"title": {"text": x}}
    if is_by_step:
        x_axis |= {"type": "category", "nticks": 20}
    axes = {"xaxis": x_axis, "yaxis": {"title": {"text": y}, "rangemode": "tozero"}}
    return {"data": data, "layout": {**axes, "height": height, **layout}}
