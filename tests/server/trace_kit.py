"""The trace of a run, as its route tells it."""

from typing import Any, TypeVar

import msgspec

from forebay.telemetry.tracing.records import Record
from tests.kit import NativeRun, poll_until

_decoder = msgspec.json.Decoder(Record)
R = TypeVar("R", bound=Any)


def trace_lines(run: NativeRun) -> list[bytes]:
    """Every line of ``GET …/trace``."""
    response = run.client.get(f"{run.path}/trace")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert response.content == b"" or response.content.endswith(b"\n")
    return response.content.splitlines()


def records(run: NativeRun) -> list[Record]:
    """All of them, decoded: each line must be one."""
    return [_decoder.decode(line) for line in trace_lines(run)]


def of_kind(run: NativeRun, kind: type[R], **wanted: object) -> list[R]:
    """The records of one kind with these values, in the order of time."""
    found = [each for each in records(run) if isinstance(each, kind)]
    matching = [each for each in found if all(getattr(each, name) == value for name, value in wanted.items())]
    return sorted(matching, key=lambda each: each.t)  # type: ignore[no-any-return]


def first(run: NativeRun, kind: type[R], **wanted: object) -> R:
    """The first such record, once there is one."""
    return poll_until(lambda: of_kind(run, kind, **wanted))[0]
