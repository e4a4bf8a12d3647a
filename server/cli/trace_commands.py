"""``forebay trace``: exports a run's trace in other tools' formats."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from forebay.core.errors import InvalidInput
from forebay.server.cli.options import DEFAULT_URL, Token, Url
from forebay.server.cli.output import echo
from forebay.server.cli.trace_source import DataDir, Given, TraceSource, open_source
from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.read_trace import BadLines
from forebay.telemetry.tracing.records import Dropped

if TYPE_CHECKING:
    from forebay.replay.recording import Recording
    from forebay.telemetry.export.otel_spans import Content

MOST_PROBLEMS = 10
"""Maximum number of skipped lines to list."""

app = typer.Typer(no_args_is_help=True, help="Export the trace of a run to other tools.")


@app.callback()
def _trace() -> None: ...  # with a callback, the only command below keeps its name


class ExportTarget(StrEnum):
    """Targets of an export."""

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
        Path | None, typer.Option("--output", help="Where to write.  [default: a name made from the run's]")
    ] = None,
    has_content: Annotated[
        bool, typer.Option("--content", help="Send prompts and replies too, of a run of the server (otlp).")
    ] = False,
    data_dir: DataDir = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
) -> None:
    """Write the trace of a run for another tool, or send it to one. No file is ever overwritten.

    `forebay export` writes rollouts as ATIF, Parquet or JSON Lines, `forebay recording export` a file to replay.
    """
    if has_content and (target is not ExportTarget.OTLP or Path(given).exists()):
        hint = "forebay trace export RUN --to otlp --content, with a run of the server"
        raise InvalidInput("--content needs a run, whose samples have the texts, and --to otlp", hint=hint)
    with open_source(given, url, token, data_dir) as source:
        if source.is_verl_log:
            hint = f"`forebay profile {given}` reads it"
            raise InvalidInput(f"{given} is verl's profile log, but only traces can be exported", hint=hint)
        if target is ExportTarget.PERFETTO:
            _draw(source, output)
        elif has_content:
            from forebay.server.cli.recordings.recording_download import open_recording_of

            with open_recording_of(given, url, token, partial=True) as recording:
                _send(source, output, partial(_messages, recording))
        else:
            _send(source, output)


def _messages(recording: "Recording", group: str, uid: str, attempt: int) -> Sequence[Any]:
    """The messages of an attempt of a rollout; none if its sample is not stored, or is of a later attempt."""
    from forebay.replay.errors import NotRecorded, RecordingDamaged
    from forebay.replay.exporters.rollouts import RolloutSample

    try:
        stored = [each for each in recording.samples(group) if each.row.uid == uid]
        fields = [RolloutSample(each.row, recording.body(each)).fields for each in stored]
    except (NotRecorded, RecordingDamaged):
        return ()
    return next((each["messages"] for each in fields if each.get("attempt", attempt) == attempt), ())


def _draw(source: TraceSource, output: Path | None) -> None:
    from forebay.telemetry.export.perfetto import PerfettoExport

    path = output or Path(f"{_name(source)}.perfetto.json")
    with _new_file(path) as file, _read(source) as db:
        drawing = PerfettoExport(file)
        drawing.draw(db)
    echo(str(path))
    echo(f"attempts of rollouts: {drawing.num_attempts:,}; open the file at https://ui.perfetto.dev", err=True)


def _send(source: TraceSource, output: Path | None, content: "Content | None" = None) -> None:
    from forebay.telemetry.export.otlp import OtlpExport

    if output is not None:
        hint = "set OTEL_EXPORTER_OTLP_ENDPOINT to the collector's address"
        raise InvalidInput("--output names a file, but spans are sent to a collector", hint=hint)
    sending = OtlpExport()
    with closing(sending), _read(source) as db:
        sending.send(db, content)
    echo(f"{sending.num_sent:,} spans sent to {sending.endpoint}", err=True)


@contextmanager
def _read(source: TraceSource) -> Iterator[TraceDB]:
    """Open the trace to export. On exit, reports what is missing from it."""
    bad = BadLines()
    db = TraceDB.read(source.folder, on_bad_line=bad.add)
    yield db
    dropped = [line.record for line in db.of_run() if isinstance(line.record, Dropped)]
    if dropped:
        spans, summaries = sum(each.spans for each in dropped), sum(each.summaries for each in dropped)
        lost = f"{spans:,} spans and {summaries:,} summaries of rollouts"
        echo(f"{lost} are not in the trace: it records them as dropped", err=True)
    if bad.number:
        echo(f"{bad.number:,} {'line was' if bad.number == 1 else 'lines were'} left out:", err=True)
    for each in bad.first[:MOST_PROBLEMS]:
        echo(f"  {Path(each.file).name}:{each.line}: {each.what}", err=True)
    if bad.number > MOST_PROBLEMS:
        echo(f"  and {bad.number - MOST_PROBLEMS:,} more", err=True)


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Create a new file; remove it if it cannot be written to the end."""
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
