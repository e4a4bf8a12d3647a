"""One line of a log in the published layout, in every spelling that was written so far.

``timestamp`` is the END of what took ``duration_sec``. Ids stand in ``extra`` or beside it, the worker is ``workid`` or
``worker``, and any key that nobody knows is kept.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from forebay.telemetry.tracing.read_trace import OnBadLine

_WORKER_KEYS = ("workid", "worker", "worker_id")
_REQUEST_KEYS = ("request_id", "req_id", "rid")
_KNOWN = {"timestamp", "event", "duration_sec", "extra", "step", *_WORKER_KEYS}


@dataclass(slots=True)
class PublishedLine:
    """What one line says, whatever its spelling."""

    event: str
    end_s: float
    """Seconds since the Unix epoch; a time without a zone is taken as UTC, for only differences count."""
    duration_s: float | None
    worker: str
    request_id: str
    info: dict[str, Any] = field(default_factory=dict)
    """``extra``, and the keys beside it."""

    @property
    def begin_s(self) -> float:
        return self.end_s - (self.duration_s or 0.0)


def read_lines(path: Path, worker: str, on_bad_line: OnBadLine) -> Iterator[PublishedLine]:
    """The lines of one file, whose worker is ``worker`` where they do not say. Broken ones go to ``on_bad_line``."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                yield _line(_decode(raw), worker)
            except ValueError as error:
                on_bad_line(str(path), number, str(error))


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        line = _lenient(raw)
    if not isinstance(line, dict):
        raise ValueError("not an object")
    return line


def _lenient(raw: bytes) -> object:
    """Python's own ``json`` writes NaN and Infinity, which no JSON is: such a line is whole, but its time is wrong."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("not whole, or no JSON") from None


def _line(raw: dict[str, Any], worker: str) -> PublishedLine:
    event = raw.get("event")
    if not isinstance(event, str) or not event:
        raise ValueError("names no event")
    extra = raw.get("extra")
    info = {key: value for key, value in raw.items() if key not in _KNOWN}
    info |= extra if isinstance(extra, dict) else {}
    return PublishedLine(
        event,
        _moment(raw.get("timestamp")),
        _duration(raw.get("duration_sec")),
        _first(raw, _WORKER_KEYS, worker).removeprefix("worker_"),
        _first(info, _REQUEST_KEYS, ""),
        info,
    )


def _first(values: dict[str, Any], keys: tuple[str, ...], default: str) -> str:
    for key in keys:
        value = values.get(key)
        if isinstance(value, str | int) and value != "":
            return str(value)
    return default


def _duration(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"duration_sec is no number: {str(value)[:40]!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"duration_sec is {value}")
    return float(value)


def _moment(value: object) -> float:
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"timestamp is no ISO time: {value[:40]!r}") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("has no timestamp")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"timestamp is {value}")
    return float(value)


def number_of(info: dict[str, Any], *keys: str) -> float | None:
    """The first of ``keys`` that has a number which can be counted with."""
    for key in keys:
        value = info.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None
