"""``forebay trace``: the trace of a run in the formats of others."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from forebay.core.errors import ForebayError, InvalidInput
from forebay.server.cli.client import NoServer
from forebay.server.cli.options import DEFAULT_URL, Token, Url
from forebay.server.cli.output import echo
from forebay.server.cli.trace_source import DataDir, Given, TraceSource, open_source
from forebay.telemetry.export.follow_log import CtrlC, Sink, export_log, follow_log
from forebay.telemetry.export.followed_steps import FollowedSteps
from forebay.telemetry.tracing.read_trace import TraceFolder, TraceLine
from forebay.telemetry.tracing.records import Dropped

MOST_PROBLEMS = 10
"""Lines that were left out, as many as are named."""

app = typer.Typer(no_args_is_help=True, help="Bring the trace of a run to other tools.")


@app.callback()
def _trace() -> None: ...  # with a callback, the only command below keeps its name


class ExportTarget(StrEnum):
    """Where a trace goes."""

    PERFETTO = "perfetto"
    PUBLISHED = "published"
    OTLP = "otlp"


@app.command("export", short_help="Write a trace for Perfetto or other scripts, or send it to a collector.")
def export(
    given: Given,
    target: Annotated[
        ExportTarget,
        typer.Option(
            "--to",
            help="A file for ui.perfetto.dev; a folder in the published layout of multi-turn profiles; or spans to the "
            "collector that OTEL_* variables name.",
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on as the trace grows, until the run has ended, or Ctrl-C.")
    ] = False,
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
        {ExportTarget.PERFETTO: _draw, ExportTarget.PUBLISHED: _write, ExportTarget.OTLP: _send}[target](
            source, output, follow
        )


def _draw(source: TraceSource, output: Path | None, follow: bool) -> None:
    from forebay.telemetry.export.perfetto import PerfettoExport

    path = output or Path(f"{_name(source)}.perfetto.json")
    with _new_file(path) as file:
        drawing = PerfettoExport(file)
        _bring(source, drawing, CtrlC() if follow else None)
    echo(str(path))
    echo(f"attempts of rollouts: {drawing.num_attempts:,}; open the file at https://ui.perfetto.dev", err=True)


def _write(source: TraceSource, output: Path | None, follow: bool) -> None:
    from forebay.telemetry.analysis import load
    from forebay.telemetry.export.published import PublishedExport

    folder = output or Path(f"{_name(source)}.published")
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"{folder} is a file", hint="--output is a folder here")
    writing = FollowedSteps(lambda: load(source.folder), PublishedExport(folder))
    if follow:
        ctrl_c = CtrlC()
        with ctrl_c.taken():
            follow_log(TraceFolder(source.folder, lambda *_: None), writing, ctrl_c, _Refresh(source))
    else:
        writing.finish()
    echo(str(folder))
    echo(f"steps: {writing.num_steps:,}", err=True)
    problems = _Problems()
    for each in writing.problems:
        problems.add(each.file, each.line, each.what)
    problems.show(writing.num_problems)


def _send(source: TraceSource, output: Path | None, follow: bool) -> None:
    from forebay.telemetry.export.otlp import OtlpExport

    if output is not None:
        hint = "OTEL_EXPORTER_OTLP_ENDPOINT says where the collector is"
        raise InvalidInput("--output is a file, and spans go to a collector", hint=hint)
    ctrl_c = CtrlC() if follow else None
    sending = OtlpExport(lambda text: echo(text, err=True), ctrl_c.wait if ctrl_c else time.sleep)
    try:
        _bring(source, sending, ctrl_c)
    except KeyboardInterrupt:  # while the collector is away
        message = f"{sending.num_sent:,} spans were sent, {sending.num_waiting:,} more were not"
        raise ForebayError(message, hint="export once more: the spans have the same ids") from None
    finally:
        sending.close()
    rejected = f", of which it did not keep {sending.num_rejected:,}" if sending.num_rejected else ""
    echo(f"{sending.num_sent:,} spans sent to {sending.endpoint}{rejected}", err=True)


def _bring(source: TraceSource, sink: Sink, ctrl_c: CtrlC | None) -> None:
    """All lines to ``sink``; with a ``ctrl_c``, those to come as well."""
    problems, counting = _Problems(), _Counting(sink)
    folder = TraceFolder(source.folder, problems.add)
    if ctrl_c is None:
        export_log(folder, counting)
    else:
        with ctrl_c.taken():
            follow_log(folder, counting, ctrl_c, _Refresh(source))
    counting.show()
    problems.show()


class _Counting:
    """A sink before another one, which counts what the log says that it lacks."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._num_spans = 0
        self._num_summaries = 0
        self.flush, self.finish = sink.flush, sink.finish

    def add(self, line: TraceLine) -> None:
        if isinstance(line.record, Dropped):
            self._num_spans += line.record.spans
            self._num_summaries += line.record.summaries
        self._sink.add(line)

    def show(self) -> None:
        if self._num_spans or self._num_summaries:
            lost = f"{self._num_spans:,} spans and {self._num_summaries:,} summaries of rollouts"
            echo(f"{lost} are not in the trace: dropped, as it says itself", err=True)


class _Refresh:
    """Brings the source up to date. A server that is away is told of once, and asked again."""

    def __init__(self, source: TraceSource) -> None:
        self._source = source
        self._is_away = False

    def __call__(self) -> None:
        try:
            self._source.refresh()
            self._is_away = False
        except NoServer as error:
            if not self._is_away:
                echo(f"{error}; asking again until it does", err=True)
            self._is_away = True


class _Problems:
    """Lines that were left out."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._number = 0

    def add(self, file: str, line: int, what: str) -> None:
        self._number += 1
        if len(self._first) < MOST_PROBLEMS:
            self._first.append(f"{file}:{line}: {what}")

    def show(self, number: int | None = None) -> None:
        number = self._number if number is None else number
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
