"""Pictures of what happened when: the requests of a step, its critical path, and a single request."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from forebay.telemetry.analysis.report import Lane, PathPart, StepLanes, StepSummary
from forebay.telemetry.analysis.robust import longest
from forebay.telemetry.numbers import short, shortened
from forebay.telemetry.render.blocks import Chart
from forebay.telemetry.render.charts import ENGINE, QUIET, WAIT, chart_of, colour_of, label

MOST_PIECES = 5_000
"""Limit for one picture: its longest pieces."""
_LONGEST_NAME = 28
_BELOW_PX = 110
"""Height of the number of requests in flight, below the requests."""


class _Piece(NamedTuple):
    row: str | int
    phase: str
    begin_s: float
    seconds: float


def step_lanes(lanes: StepLanes, step: StepSummary) -> Chart:
    """The requests of a step as rows, grouped by worker; below them, how many were in flight."""
    rows, pieces, last = _rows(lanes.lanes)
    data = _bars(longest(pieces, MOST_PIECES, lambda piece: piece.seconds))
    marker = {"symbol": "triangle-left", "size": 11, "color": WAIT}
    x, y = [short(piece.begin_s + piece.seconds) for piece in last], [piece.row for piece in last]
    hover = {"marker": marker, "hovertemplate": "%{y} ended after %{x} s<extra>waited for last</extra>"}
    data.append({"type": "scatter", "mode": "markers", "name": "waited for last", "x": x, "y": y, **hover})
    moments, counts = zip(*lanes.in_flight, strict=True) if lanes.in_flight else ((), ())
    below = {"type": "scatter", "mode": "lines", "fill": "tozeroy", "yaxis": "y2", "showlegend": False}
    hover = {"line": {"shape": "hv", "color": ENGINE, "width": 1}, "hovertemplate": "%{y} in flight after %{x} s"}
    data.append({**below, "name": "in flight", "x": shortened(moments), "y": list(counts), **hover})
    inside_px = (12 if len(rows) > 30 else 18) * max(4, len(rows)) + _BELOW_PX
    chart = chart_of(data, x="seconds since the step began", y="", barmode="overlay", height=inside_px + 90, bargap=0.2)
    split = _BELOW_PX / inside_px
    first = min((piece.begin_s for piece in pieces), default=0.0)
    ticks = {"tickvals": list(range(len(rows))), "ticktext": rows, "tickfont": {"size": 9}, "automargin": True}
    layout = chart["layout"]
    layout["xaxis"] |= {"range": shortened([max(first, -0.1 * step.seconds), 1.02 * step.seconds]), "anchor": "y2"}
    layout["yaxis"] = {"range": [len(rows) - 0.5, -0.5], "domain": [split, 1], "showgrid": False, **ticks}
    layout["yaxis2"] = {"domain": [0, split * 0.8], "rangemode": "tozero", "nticks": 4, "title": {"text": "in flight"}}
    layout["shapes"] = [] if step.train_s is None else [_moment(step.train_s, "the trainer asks")]
    return chart


def _rows(lanes: Sequence[Lane]) -> tuple[list[str], list[_Piece], list[_Piece]]:
    """Names of the rows from the top, their pieces, and the last piece of each request that was waited for."""
    names: list[str] = []
    pieces: list[_Piece] = []
    last: list[_Piece] = []
    has_workers = len({lane.worker for lane in lanes}) > 1
    worker = None
    for lane in lanes:
        if has_workers and lane.worker != worker:
            worker = lane.worker
            names.append(f"<b>{label(worker, _LONGEST_NAME)}</b>")
        own = [_Piece(len(names), *piece) for piece in lane.pieces]
        pieces += own
        last += own[-1:] if lane.is_last else []
        name = label(lane.request, _LONGEST_NAME)
        names.append(f"<b>▶ {name}</b>" if lane.is_last else name)
    return names, pieces, last


def _moment(x: float, text: str) -> Chart:
    line = {"color": QUIET, "dash": "dot", "width": 1}
    place = {"xref": "x", "yref": "paper", "x0": short(x), "x1": short(x), "y0": 0, "y1": 1}
    look = {"textposition": "start", "textangle": 0, "xanchor": "left", "font": {"size": 10}}
    return {"type": "line", **place, "line": line, "label": {"text": text, **look}}


def critical_path(parts: Sequence[PathPart]) -> Chart:
    """What a step's data waited for, one stretch after another."""
    begin = parts[0].begin_s if parts else 0.0
    pieces = [_Piece("critical path", part.path.event, part.begin_s - begin, part.seconds) for part in parts]
    return _timeline(pieces, "seconds of the wait")


def request_timeline(events: Sequence[Mapping[str, Any]]) -> Chart:
    """The events of one request, with a row for each turn."""
    pieces = [
        _Piece(turn_text(each.get("turn")) or "outside turns", each["name"], each["begin_s"], each["seconds"])
        for each in events
    ]
    return _timeline(pieces, "seconds since the request began")


def turn_text(turn: object) -> str:
    """The number of a turn for people, starting at 1; "" without one."""
    return f"turn {turn + 1}" if isinstance(turn, int) else ""


def _timeline(pieces: Sequence[_Piece], x: str) -> Chart:
    rows = list(dict.fromkeys(piece.row for piece in pieces))
    chart = chart_of(_bars(pieces), x=x, y="", barmode="overlay", height=130 + 30 * len(rows))
    chart["layout"]["yaxis"] |= {"categoryarray": rows[::-1], "type": "category", "automargin": True}
    return chart


def _bars(pieces: Iterable[_Piece]) -> list[Chart]:
    """Bars for each phase, the one with the most time first."""
    by_phase: dict[str, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        by_phase[piece.phase].append(piece)
    bars = []
    for phase, own in sorted(by_phase.items(), key=lambda item: -sum(piece.seconds for piece in item[1])):
        rows, _, begins, lengths = zip(*own, strict=True)
        place = {"y": list(rows), "base": shortened(begins), "x": shortened(lengths), "marker": colour_of(phase)}
        hover = "%{y}: %{base:.4~g} s to %{x:.4~g} s<extra>%{fullData.name}</extra>"
        bars.append({"type": "bar", "orientation": "h", "name": label(phase), **place, "hovertemplate": hover})
    return bars
