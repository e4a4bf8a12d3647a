"""Parses the lines of verl's profile log, in every spelling in use, and classifies their events.

``timestamp`` is the END of an event that took ``duration_sec``. Ids are in ``extra`` or at the top level, the worker is
``workid`` or ``worker``, and unknown keys are kept.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from sys import intern
from typing import Any

import msgspec

from forebay.telemetry.tracing.read_trace import LONGEST_NS, OnBadLine

_WORKER_KEYS = ("workid", "worker", "worker_id")
_REQUEST_KEYS = ("request_id", "req_id", "rid")
_KNOWN = {"timestamp", "event", "duration_sec", "extra", "step", *_WORKER_KEYS}

STEP_TOTAL = "total_step_duration"
LENGTH_STATS = "step_response_length_stats"
MONITORING = "async_rollout_with_monitoring_duration"
COMPLETE = "async_rollout_request_complete"
ABORTS = ("aborted_request", "aborted_request_with_exception", "aborted_request_with_cancelled_error")
PADDINGS = tuple(f"{event}_padding" for event in ABORTS)
"""The slot of an aborted request was filled. This is not another abort."""
RESOLUTION_NS = 2_000
"""Times are written in microseconds: moments no further apart than this are equal."""

CONTAINERS = {COMPLETE, *ABORTS, "main_loop", "turn_end"}
"""Events of a request that only group others."""
STATES = {
    "pending_state_handling",
    "tool_calling_state",
    "interacting_state",
    "turn_pre_process",
    "turn_engine_call",
    "turn_post_process",
    "reward_calculation",
    "finalization",
}
"""Events of a request of which only one is open at a time."""
OUTER = {*STATES, MONITORING, "async_generate_duration"}
"""Anything else that a request or worker does meanwhile is a part of these, and counts instead."""
GENERATION = (MONITORING, "async_generate_duration", "engine_async_generate")
"""Events during which a worker generates, the most exact first."""

_PHASES = {
    "turn_engine_call": "engine",
    "engine_async_generate_actual": "engine",
    "tool_execution": "tool",
    "reward_calculation": "reward",
    "reward_duration": "reward",
    "barrier": "barrier_wait",
    MONITORING: "async_generate",
}
"""Events that have another name in reports. All others keep their name, without ``_duration``."""


def phase_of(event: str) -> str:
    """The name of ``event`` in a report."""
    return _PHASES.get(event) or event.removesuffix("_duration")


@dataclass(slots=True)
class VerlLine:
    """One parsed line. Times in ns, with the log's resolution of microseconds."""

    event: str
    end: int
    """Since the Unix epoch. Times without a zone are read as UTC: only differences matter."""
    d: int | None
    worker: str
    request_id: str
    extra: bytes
    """JSON of ``extra`` and of unknown keys of the top level, which takes less memory than objects."""

    @property
    def info(self) -> dict[str, Any]:
        """``extra``, decoded each time."""
        return _decode(self.extra)

    @property
    def begin(self) -> int:
        """The begin; equal to the end if it has no duration."""
        return self.end - (self.d or 0)


def read_lines(path: Path, worker: str, on_bad_line: OnBadLine) -> Iterator[VerlLine]:
    """The lines of a file, maybe compressed. Those that name no worker are of ``worker``; invalid ones are reported."""
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, raw in enumerate(file, 1):
                try:
                    if raw.strip():
                        yield _line(_decode(raw), worker)
                except ValueError as error:
                    on_bad_line(str(path), number, str(error))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            on_bad_line(str(path), number + 1, f"the rest of the file cannot be decompressed: {error}")


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            line = json.loads(raw)  # accepts NaN and Infinity, which Python's json writes
        except (ValueError, RecursionError):
            raise ValueError("not a complete line of JSON") from None
    if not isinstance(line, dict):
        raise ValueError("not an object")
    return line


def _line(raw: dict[str, Any], worker: str) -> VerlLine:
    event = raw.get("event")
    if not isinstance(event, str) or not event:
        raise ValueError("has no event name")
    extra = raw.get("extra")
    info = extra if isinstance(extra, dict) else {}
    if not raw.keys() <= _KNOWN:
        info = {key: value for key, value in raw.items() if key not in _KNOWN} | info
    lasted = raw.get("duration_sec")
    d = None if lasted is None else _ns("duration_sec", lasted)
    end = round(_ns("timestamp", _moment(raw.get("timestamp"))), -3)
    worker, request_id = _first(raw, _WORKER_KEYS, worker).removeprefix("worker_"), _first(info, _REQUEST_KEYS, "")
    return VerlLine(intern(event), end, d, intern(worker), intern(request_id), msgspec.json.encode(info))


def _first(values: dict[str, Any], keys: tuple[str, ...], default: str) -> str:
    for key in keys:
        value = values.get(key)
        if isinstance(value, str | int) and value != "":
            return str(value)
    return default


def _moment(value: object) -> object:
    """``value``, as seconds since the Unix epoch if it is an ISO time."""
    if not isinstance(value, str):
        return value
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(f"timestamp must be an ISO time (got {value[:40]!r})") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _ns(what: str, seconds: object) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValueError(f"{what} must be a number (got {str(seconds)[:40]!r})")
    if not 0 <= seconds * 1e9 < LONGEST_NS:  # also false for NaN
        raise ValueError(f"{what} is out of range: {seconds}")
    return round(seconds * 1e9)


def number_of(info: dict[str, Any], *keys: str) -> float | None:
    """The first finite number among the values of ``keys``."""
    for key in keys:
        value = info.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None
