"""Whatever log is there, as a timeline: a trace of ours, or one in the published layout."""

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import cast

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis.load_published import PublishedLog, find_steps
from forebay.telemetry.analysis.load_trace import LOOKED_FOR, load_trace
from forebay.telemetry.analysis.timeline import Timeline
from forebay.telemetry.tracing.read_trace import find_trace

PUBLISHED_FILES = "step_*/worker_*.jsonl"

LogSource = str | PathLike[str] | Iterable[bytes | str]
"""A folder (or a file of a trace), or the lines that ``GET /v1/runs/{run_id}/trace`` streams."""


def load(*sources: LogSource) -> Timeline:
    """The timeline of a run's trace, or of a log in the published layout.

    Several sources are parts of one trace. ``InvalidInput``, which says what was looked for, where there is no such
    folder, no log in it, or no record among the lines.
    """
    if not sources:
        raise InvalidInput("nothing to load: give a folder, or the lines of a trace")
    given = [_checked(each) for each in sources]
    (first, *others) = given
    if isinstance(first, Path) and not others and first.is_dir() and find_trace(first) is None:
        return cast(Timeline, PublishedLog(first))
    return load_trace(*given)


def _checked(source: LogSource) -> Path | Iterable[bytes | str]:
    if isinstance(source, str | PathLike):
        _check_there(Path(source))
        return Path(source)
    return source


def _check_there(folder: Path) -> None:
    if not folder.exists():
        raise InvalidInput(f"no folder {folder}: looked for {LOOKED_FOR}, or {PUBLISHED_FILES}", field="source")
    if folder.is_dir() and find_trace(folder) is None and not find_steps(folder):
        raise InvalidInput(f"no log in {folder}: looked for {LOOKED_FOR}, or {PUBLISHED_FILES}", field="source")
