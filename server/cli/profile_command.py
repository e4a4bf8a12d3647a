"""``forebay profile``."""

import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.core.errors import ForebayError, InvalidInput
from forebay.core.lazy_names import require_extra
from forebay.server.cli.options import DEFAULT_URL, Token, Url
from forebay.server.cli.output import echo, make_console
from forebay.server.cli.trace_source import DataDir, Given, TraceSource, open_source
from forebay.telemetry.visible_text import visible, visible_json

if TYPE_CHECKING:
    # Imported where it is needed, so that other commands start without it.
    from forebay.telemetry.analysis.report import ProfileReport


class ReportFormat(StrEnum):
    """Output formats of a report."""

    html = "html"
    md = "md"
    json = "json"


SUFFIXES = {".html": ReportFormat.html, ".htm": ReportFormat.html, ".md": ReportFormat.md, ".json": ReportFormat.json}
TO_STANDARD_OUTPUT = Path("-")

StepName = Annotated[str | None, typer.Option("--step", help="Only this step.")]
WorkerName = Annotated[str | None, typer.Option("--worker", help="Only requests of this engine or worker.")]
Compared = Annotated[
    list[str] | None, typer.Option("--compare", metavar="RUN|DIR…", help="Compare it with these, step by step.")
]
MoreCompared = Annotated[list[str] | None, typer.Argument(metavar="", hidden=True)]
ChosenFormat = Annotated[
    ReportFormat | None,
    typer.Option("--format", help="html has plots, md and json do not.  [default: a summary in the terminal]"),
]
OutputFile = Annotated[
    Path | None, typer.Option("--output", help="File to write; - is standard output. Its ending selects the format.")
]


def command(
    given: Given,
    more: MoreCompared = None,
    step: StepName = None,
    worker: WorkerName = None,
    compare: Compared = None,
    chosen: ChosenFormat = None,
    output: OutputFile = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    data_dir: DataDir = None,
) -> None:
    """Show why steps were slow: which request, turn and event delayed them, the costliest first."""
    if more and not compare:
        raise InvalidInput(
            f"only one run can be profiled (got {len(more) + 1})", hint="compare it with others: --compare"
        )
    wanted = _format(chosen, output)
    # Checked before work that may take a minute.
    if wanted is ReportFormat.html:
        require_extra("report", "plotly")
    _check_writable(output)
    with ExitStack() as stack:
        named = [given, *(compare or ()), *(more or ())]
        sources = [stack.enter_context(open_source(each, url, token, data_dir)) for each in named]
        reports = [_report(sources[0], step, worker), *(_report(each, step, None) for each in sources[1:])]
    _write(wanted, output, reports)


def _format(chosen: ReportFormat | None, output: Path | None) -> ReportFormat | None:
    if chosen is not None or output is None:
        return chosen
    return SUFFIXES.get(output.suffix.lower(), ReportFormat.html)


def _check_writable(output: Path | None) -> None:
    if output is None or output == TO_STANDARD_OUTPUT:
        return
    if output.is_dir():
        raise InvalidInput(f"{output} is a folder", hint="--output names the file to write")
    if not output.parent.is_dir():
        raise InvalidInput(f"there is no folder {output.parent}", hint="create it first, or choose another --output")


def _report(source: TraceSource, step: str | None, worker: str | None) -> "ProfileReport":
    from forebay.telemetry.analysis import analyse, load

    try:
        report = analyse(load(source.folder), step=step, worker=worker)
    except InvalidInput as error:
        raise InvalidInput(f"{source.title}: {error}", hint=error.hint) from None
    report.source = visible(source.title)
    return report


def _write(wanted: ReportFormat | None, output: Path | None, reports: "Sequence[ProfileReport]") -> None:
    report, *others = reports
    match wanted:
        case None:
            from forebay.server.cli.profile_summary import show_summary

            show_summary(make_console(), report, others)
        case ReportFormat.html:
            from forebay.telemetry.render.page import page

            _deliver(page(report, others), output or Path(f"profile-{_file_name(report.source)}.html"))
        case ReportFormat.md:
            from forebay.telemetry.render.markdown import markdown

            _deliver(markdown(report, others), output or TO_STANDARD_OUTPUT)
        case ReportFormat.json:
            _deliver(_json(reports), output or TO_STANDARD_OUTPUT)


def _json(reports: "Sequence[ProfileReport]") -> str:
    """The report as JSON. ``compared`` has the other reports, if any, and ``comparison`` the differences."""
    import msgspec

    from forebay.telemetry.analysis.compare import compare

    document = msgspec.to_builtins(reports[0], str_keys=True)
    if len(reports) > 1:
        document["compared"] = [msgspec.to_builtins(other, str_keys=True) for other in reports[1:]]
        document["comparison"] = msgspec.to_builtins(compare(reports), str_keys=True)
    return visible_json(document)


def _deliver(text: str, output: Path) -> None:
    if output == TO_STANDARD_OUTPUT:
        typer.echo(text)
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            with suppress(OSError):  # half a page would look like a whole one
                output.unlink(missing_ok=True)
            hint = "make room, or name another file with --output"
            raise ForebayError(f"{output} cannot be written: {error.strerror}", hint=hint) from None
        echo(f"wrote {output}")


def _file_name(source: str) -> str:
    """A file name made from the last part of a run's id or folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).name).strip("-.") or "report"
