"""``forebay trace``: the trace of a run in the formats of others."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from forebay.core.errors import InvalidInput
from forebay.server.cli.options import DEFAULT_URL, Token, Url
from forebay.server.cli.output import echo
from forebay.server.cli.trace_source import DataDir, Given, TraceSource, open_source
from forebay.telemetry.tracing.read_trace import Sink, TraceFolder, TraceLine
from forebay.telemetry.tracing.records import Dropped

MOST_PROBLEMS = 10
"""Lines that were left out, as many as are named."""

app = typer.Typer(no_args_is_help=True, help="Bring the trace of a run to other tools.")


@app.callback()
def _trace() -> None: ...  # with a callback, the only command below keeps its name


class ExportTarget(StrEnum):
    """Where a trace goes."""

    PERFETTO = "perfetto"
    OTLP = "otlp"


@app.command("export", short_help="Write a trace for Perfetto, or send it to a collector.")
def export(
    given: Given,
    target: Annotated[
        ExportTarget,
        typer.Option(
            "--to",
            help="A file for ui.perfetto.dev, or spans to the collector that OTEL_* variables name.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", help="Where to write; something of the run's name if it is not given.")
    ] = None,
    data_dir: DataDir = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
) -> None:
    """Write the trace of a run for other tools, or send it to one. No file is ever overwritten."""
    with open_source(given, url, token, data_dir) as source:
        if source.is_published:
            hint = f"`forebay profile {given}` reads it"
            raise InvalidInput(f"{given} is a log in the published layout, and only traces are exported", hint=hint)
        {ExportTarget.PERFETTO: _draw, ExportTarget.OTLP: _send}[target](source, output)


def _draw(source: TraceSource, output: Path | None) -> None:
    from forebay.telemetry.export.perfetto import PerfettoExport

    path = output or Path(f"{_name(source)}.perfetto.json")
    with _new_file(path) as file:
        drawing = PerfettoExport(file)
        _bring(source, drawing)
    echo(str(path))
    echo(f"attempts of rollouts: {drawing.num_attempts:,}; open the file at https://ui.perfetto.dev", err=True)


def _send(source: TraceSource, output: Path | None) -> None:
    from forebay.telemetry.export.otlp import OtlpExport

    if output is not None:
        hint = "OTEL_EXPORTER_OTLP_ENDPOINT says where the collector is"
        raise InvalidInput("--output is a file, and spans go to a collector", hint=hint)
    sending = OtlpExport()
    try:
        _bring(source, sending)
    finally:
        sending.close()
    echo(f"{sending.num_sent:,} spans sent to {sending.endpoint}", err=True)


def _bring(source: TraceSource, sink: Sink) -> None:
    """Export all lines, then report those that were left out."""
    problems, counting = _Problems(), _Counting(sink)
    TraceFolder(source.folder, problems.add).export(counting)
    counting.show()
    problems.show()


class _Counting:
    """A sink before another one, which counts what the log says that it lacks."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._num_spans = 0
        self._num_summaries = 0
        self.finish = sink.finish

    def add(self, line: TraceLine) -> None:
        if isinstance(line.record, Dropped):
            self._num_spans += line.record.spans
            self._num_summaries += line.record.summaries
        self._sink.add(line)

    def show(self) -> None:
        if self._num_spans or self._num_summaries:
            lost = f"{self._num_spans:,} spans and {self._num_summaries:,} summaries of rollouts"
            echo(f"{lost} are not in the trace: dropped, as it says itself", err=True)


class _Problems:
    """Lines that were left out."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._number = 0

    def add(self, file: str, line: int, what: str) -> None:
        self._number += 1
        if len(self._first) < MOST_PROBLEMS:
            self._first.append(f"{file}:{line}: {what}")

    def show(self) -> None:
        number = self._number
        if number:
            echo(f"{number:,} {'line was' if number == 1 else 'lines were'} left out:", err=True)
        for text in self._first:
            echo(f"  {text}", err=True)
        if number > len(self._first):
            echo(f"  and {number - len(self._first):,} more", err=True)


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that was not there; gone again if it cannot be written to the end."""
    try:
        file = path.open("xb")
    except FileExistsError:
        raise InvalidInput(f"{path} exists", hint="give another --output, or remove it") from None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", hint="give another --output") from None
    try:
        with file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _name(source: TraceSource) -> str:
    return Path(source.title).resolve().name or "trace"
