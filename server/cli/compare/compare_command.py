"""``forebay compare``."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.core.lazy_names import require_extra
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url, check_plot, writing_plot
from forebay.server.cli.output import make_console, print_json

if TYPE_CHECKING:
    # Imported where it is needed, so that other commands start without it.
    from forebay.replay.comparison import Comparison
    from forebay.replay.recording_file import RecordingFile

Given = Annotated[
    str, typer.Argument(metavar="SOURCE", help="An exported file (*.fbr), which needs no server, or a run.")
]
CodeFile = Annotated[
    Path | None, typer.Option("--code", metavar="FILE", help="Generator file whose hooks judge the groups.")
]
RewardFunction = Annotated[
    str | None, typer.Option("--reward", metavar="FILE:NAME", help="Function that computes the rewards again.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=JSON", help="A setting of the run, as in normaliser=rloo; repeatable."),
]
ChosenSteps = Annotated[
    str | None, typer.Option("--steps", metavar="A-B,C", help="Only the groups of the batches of these steps.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw verdicts, rewards and advantages: .png or .svg.")
]


def command(
    given: Given,
    code: CodeFile = None,
    reward: RewardFunction = None,
    assignments: Changes = None,
    steps: ChosenSteps = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = "",
) -> None:
    """Judge a recording again, unchanged and with other hooks, rewards or settings, and show what changes."""
    from forebay.server.cli.compare.new_rewards import prints_to_stderr
    from forebay.server.cli.compare.what_if import WhatChanges, compare, read_changes

    check_plot(plot)
    if plot is not None:
        require_extra("sim", "matplotlib")
    changes = WhatChanges(code, reward, read_changes(assignments or []))
    with _quiet(), prints_to_stderr(), _opened(given, url, token, steps) as recorded:
        facts, comparison = asyncio.run(compare(recorded, changes, steps))
    if as_json:
        print_json({"schema": 1, "facts": facts, **comparison.as_json()})
    else:
        from forebay.server.cli.compare.comparison_summary import show_comparison

        show_comparison(make_console(), facts, comparison)
    if plot is not None:
        _draw(comparison, plot)


@contextmanager
def _opened(given: str, url: str, token: str, steps: str | None) -> "Iterator[RecordingFile]":
    """Open the recording: a file, or a run that is downloaded from the server for the duration."""
    from forebay.replay.recording_file import RecordingFile
    from forebay.server.cli.recordings.recording_download import is_recording, open_recording_of

    with ExitStack() as stack:
        console = make_console(stderr=True)
        with nullcontext() if is_recording(given) or not console.is_terminal else console.status("fetching the run"):
            recording = stack.enter_context(open_recording_of(given, url, token, steps or ""))
        yield stack.enter_context(closing(RecordingFile(recording.path)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the buffer's log of its groups, which the summary repeats."""
    logger = logging.getLogger("forebay.buffer")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _draw(comparison: "Comparison", plot: Path) -> None:
    from forebay.replay.comparison_plots import draw

    with writing_plot(plot):
        draw(comparison, plot)
