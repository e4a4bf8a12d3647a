"""The pictures as plotly data. Nothing here imports plotly: the page includes it and draws what becomes visible.

Plotly interprets texts as simple HTML, so every text from a log goes through ``label``.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from forebay.telemetry.analysis.report import CompletionCurve, Gap, StepSummary
from forebay.telemetry.analysis.robust import thinned
from forebay.telemetry.numbers import MOST_POINTS, short, shortened
from forebay.telemetry.render.blocks import Chart, FigureBlock
from forebay.telemetry.visible_text import visible

LONGEST_LABEL = 48
MOST_BARS = 60
MOST_LINES = 24
"""Limit per picture: more lines cannot be told apart."""
_COLUMNS = 3
"""Small pictures in one row."""
_MOST_CHARACTERS = 48
"""Longer names have no room above a picture; pointing at a line shows its name."""

ENGINE, WAIT, QUIET = "#2f5d8a", "#e45756", "#8c8c8c"
PALETTE = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", WAIT, "#72b7b2", "#9d755d", "#eeca3b", "#ff9da6", "#79706e"]
COLOURS = {
    "engine": ENGINE,
    "decode": "#4c78a8",
    "prefill": "#7ba6d0",
    "engine_queue": "#b5cde5",
    "engine_wait": QUIET,
    "tool": "#f58518",
    "environment": "#ffbf79",
    "agent": "#b279a2",
    "starting": "#dcc3d5",
    "reward": "#54a24b",
    "reward_queue": "#a5d49d",
    "retry": WAIT,
    "queue": "#bab0ac",
    "admission": "#d8cfca",
    "hold": "#d6b4cd",
    "group": "#eeca3b",
    "write": "#9d755d",
    "train": "#b5b9bf",
    "wait": WAIT,
    "send": "#72b7b2",
    "async_generate": "#4c78a8",
    "barrier_wait": WAIT,
}
"""Each phase has the same colour in all pictures."""


def label(text: str, most: int = LONGEST_LABEL) -> str:
    """A text from a log, escaped for plotly and shortened in the middle."""
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[-most // 2 :]}"
    return html.escape(visible(text).replace("\n", " "), quote=False)


def overview(steps: Sequence[StepSummary], anchors: Mapping[str, str]) -> Chart:
    """How long each step took, and for what. Outliers are marked. A click leads to the step."""
    steps = thinned(steps, MOST_POINTS)
    names = [label(step.name) for step in steps]
    links = [anchors.get(step.name, "") for step in steps]
    parts = {"train": [each.train_s for each in steps], "wait": [each.wait_s for each in steps]}
    parts["send"] = [each.send_s for each in steps]
    rest = [each.seconds - sum(filter(None, (each.train_s, each.wait_s, each.send_s))) for each in steps]
    is_visible = max(rest, default=0.0) > 0.001 * max((each.seconds for each in steps), default=0.0)
    parts["step" if all(each.wait_s is None for each in steps) else "rest"] = [*rest] if is_visible else []
    data = [_stacked(name, names, values) | {"customdata": links} for name, values in parts.items() if any(values)]
    if any(step.is_outlier for step in steps):
        ends = shortened(step.seconds if step.is_outlier else None for step in steps)
        marker = {"symbol": "triangle-down", "size": 11, "color": WAIT}
        marks = {"type": "scatter", "mode": "markers", "name": "outlier", "x": names, "y": ends, "marker": marker}
        data.append(marks | {"customdata": links, "hovertemplate": "step %{x}: %{y} s, an outlier<extra></extra>"})
    return chart_of(data, x="step", y="seconds", is_by_step=True, barmode="stack")


def shares_over_steps(steps: Sequence[StepSummary], phases: Iterable[str]) -> Chart:
    """The share of each step's time spent in each phase; 100 in all."""
    kept = thinned(steps, MOST_POINTS)
    names = [label(step.name) for step in kept]
    data = [_stacked(phase, names, [step.phase_shares.get(phase, 0.0) for step in kept], "%") for phase in phases]
    return chart_of(data, x="step", y="% of exclusive time", is_by_step=True, barmode="stack", bargap=0)


def completion(curves: Mapping[str, CompletionCurve], gaps: Sequence[Gap] = ()) -> Chart:
    """The share of requests that had ended over time; gaps are shaded."""
    data = []
    for name, curve in list(curves.items())[:MOST_LINES]:
        shares = [100 * place / len(curve.ends_s) for place in range(len(curve.ends_s) + 1)]
        hover = "%{y:.1f} % had ended after %{x} s<extra>%{fullData.name}</extra>"
        each = line(name, shortened([0.0, *curve.ends_s]), shares) | {"mode": "lines", "hovertemplate": hover}
        each["line"]["shape"] = "hv"
        data.append(each)
    shapes = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": short(gap.begin_s), "x1": short(gap.end_s)}
        | {"y0": 0, "y1": 1, "fillcolor": WAIT, "opacity": 0.12, "line": {"width": 0}}
        for gap in gaps[:MOST_LINES]
    ]
    return chart_of(data, x="seconds since the first request began", y="% of requests ended", shapes=shapes)


def line(name: str, x: Sequence[object], y: Iterable[float | None], colour: str = "") -> Chart:
    """A line, with points if there are few."""
    own = {"color": colour} if colour else colour_of(name)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= MOST_BARS else "lines",
        "name": label(name),
        "x": list(x),
        "y": shortened(y),
        "line": own | {"width": 2},
        "hovertemplate": "%{x}: %{y}<extra>%{fullData.name}</extra>",
    }


def _stacked(name: str, x: Sequence[object], y: Iterable[float | None], unit: str = "s") -> Chart:
    """Stacked bars, or areas if there would be too many bars to draw quickly."""
    hover = f"%{{x}}: %{{y}} {unit}<extra>%{{fullData.name}}</extra>"
    each = {"name": label(name), "x": list(x), "y": shortened(y), "hovertemplate": hover}
    if len(x) <= MOST_BARS:
        return each | {"type": "bar", "marker": colour_of(name)}
    return each | {"type": "scatter", "mode": "lines", "stackgroup": "all", "line": colour_of(name) | {"width": 0.5}}


def colour_of(name: str) -> dict[str, str | int]:
    """The phase's colour; without one, the palette is used."""
    own = COLOURS.get(name.removesuffix("_duration"))
    return {"color": own} if own else {}


def chart_of(
    data: list[Chart], *, x: str, y: str, is_by_step: bool = False, height: int = 320, **layout: object
) -> Chart:
    """A picture with titles at its axes."""
    x_axis: Chart = {"title": {"text": x}}
    if is_by_step:
        x_axis |= {"type": "category", "nticks": 20}
    axes = {"xaxis": x_axis, "yaxis": {"title": {"text": y}, "rangemode": "tozero"}}
    return {"data": data, "layout": {**axes, "height": height, "colorway": PALETTE, **layout}}


class Panel(NamedTuple):
    """One of the small pictures."""

    title: str
    unit: str
    """``%`` for shares of 1."""
    lines: Mapping[str, Sequence[float | None]]
    """Values for each name, all of one length."""


def panel_figures(name: str, title: str, x: Sequence[str], panels: Sequence[Panel]) -> list[FigureBlock]:
    """The figure of the panels that have values other than 0, if any. ``x`` names the values."""
    known = []
    for panel in panels:
        lines = {key: values for key, values in panel.lines.items() if any(values)}
        if lines:
            known.append(panel._replace(lines=lines))
    return [FigureBlock(name, title, _panel_grid(x, known))] if known else []


def _panel_grid(x: Sequence[str], panels: Sequence[Panel]) -> Chart:
    names = [label(each) for each in thinned(x, MOST_POINTS)]
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    grid = {"rows": rows, "columns": columns, "pattern": "independent", "xgap": 0.14, "ygap": 0.42}
    layout: Chart = {"height": 40 + 190 * rows, "showlegend": False, "grid": grid, "margin": {"t": 48, "b": 40}}
    layout["annotations"] = []
    data = []
    for number, panel in enumerate(panels):
        axis = str(number + 1) if number else ""
        on = {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
        for place, (name, values) in enumerate(list(panel.lines.items())[:MOST_LINES]):
            kept = thinned(values, MOST_POINTS)
            scaled = [100 * each if each is not None and panel.unit == "%" else each for each in kept]
            data.append(line(name, names, scaled, _colour(place)) | on)
        layout[f"xaxis{axis}"] = {"type": "category", "nticks": 8, "matches": "x"}
        layout[f"yaxis{axis}"] = {"rangemode": "tozero", "nticks": 5}
        layout["annotations"].append(_heading(panel, axis))
    return {"data": data, "layout": layout}


def _heading(panel: Panel, axis: str) -> Chart:
    text = f"<b>{label(panel.title)}</b>, {panel.unit}"
    if len(panel.lines) > 1 and len(" · ".join(panel.lines)) <= _MOST_CHARACTERS:
        names = (f'<span style="color:{_colour(place)}">{label(each)}</span>' for place, each in enumerate(panel.lines))
        text += f"<br>{' · '.join(names)}"
    place = {"xref": f"x{axis} domain", "yref": f"y{axis} domain", "x": 0, "y": 1}
    look = {"xanchor": "left", "yanchor": "bottom", "align": "left", "showarrow": False, "font": {"size": 11}}
    return {"text": text, **place, **look}


def _colour(place: int) -> str:
    return PALETTE[place % len(PALETTE)]
