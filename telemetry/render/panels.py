"""Small pictures side by side, with one line for each name; they share the horizontal axis."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from forebay.telemetry.analysis.robust import thinned
from forebay.telemetry.numbers import MOST_POINTS
from forebay.telemetry.render.blocks import Chart, FigureBlock
from forebay.telemetry.render.charts import MOST_LINES, PALETTE, label, line

COLUMNS = 3
_MOST_CHARACTERS = 48
"""Longer names have no room above a picture; pointing at a line shows its name."""


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
    return [FigureBlock(name, title, _chart(x, known))] if known else []


def _chart(x: Sequence[str], panels: Sequence[Panel]) -> Chart:
    names = [label(each) for each in thinned(x, MOST_POINTS)]
    columns = min(COLUMNS, len(panels))
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
