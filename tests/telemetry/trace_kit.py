"""What tests of the recorder share: a tracer of their own, what it wrote, and programs that trace."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.read_trace import decode_line, trace_files
from forebay.telemetry.tracing.records import Record
from forebay.telemetry.tracing.run_tracer import Tracer, TraceSettings

Json = dict[str, Any]
RUN = "run-0123456789ab"


def make_tracer(folder: Path, **settings: Any) -> Tracer:
    """One that is in no registry, as a gateway's would be."""
    return Tracer(TraceSettings(folder=str(folder), run_id=RUN, **settings), "gateway")


def lines_of(folder: Path) -> list[Json]:
    """All records, segment by segment. Raises where a line is no whole one."""
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    assert all(text.endswith("\n") for text in texts if text)  # one that was just made is empty
    return [json.loads(line) for text in texts for line in text.splitlines()]


def whole_lines(path: Path) -> list[bytes]:
    """All but one that is being written, or is cut off where its process was killed."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def records_in(folder: Path) -> list[Record]:
    """All records of the files of a trace, in the order of their lines. Raises where a line is none."""
    lines = [line for path in trace_files(folder) for line in path.read_bytes().splitlines(keepends=True)]
    return [record_of(line) for line in lines]


def read_whole(folder: Path) -> TraceDB:
    """The trace in ``folder``, without its broken lines."""
    return TraceDB.read(folder, on_bad_line=lambda *_: None)


def record_of(line: bytes) -> Record:
    record = decode_line(line)
    assert not isinstance(record, str), record
    return record


def of_kind(folder: Path, kind: str) -> list[Json]:
    """The records of one kind."""
    return [line for line in lines_of(folder) if line["kind"] == kind]


def kinds(folder: Path) -> Counter[str]:
    """How many there are of each kind."""
    return Counter(line["kind"] for line in lines_of(folder))


def environment(folder: Path, **changes: str) -> dict[str, str]:
    """What a process finds that a traced run starts."""
    return {**os.environ, "FOREBAY_TRACE": json.dumps({"folder": str(folder), "run_id": RUN}), **changes}


def python(program: str, **options: Any) -> "subprocess.Popen[str]":
    """A program in a process of its own."""
    return subprocess.Popen([sys.executable, "-P", "-c", program], text=True, stdout=subprocess.PIPE, **options)
