"""Finds the log that a command is about: from ``RUN|DIR`` to a folder with its files.

``DIR`` is the folder of a trace, of a run, a data directory with one run, or verl's profile log. ``RUN`` is looked up
at the server, which streams its trace. If no server answers or it does not have the run, the data directory on this
disk is searched; a data directory given explicitly is searched first. ``open_source`` always yields a folder::

    with open_source(given, url, token, data_dir) as source:
        report = analyse(load(source.folder))
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forebay.core.errors import ForebayError, InvalidInput, RunNotFound
from forebay.server.cli.client import MAX_CANDIDATES, NoServer, ServerClient
from forebay.telemetry.tracing.read_trace import find_trace

_PUBLISHED = "step_*/worker_*.jsonl"

Given = Annotated[
    str,
    typer.Argument(
        metavar="RUN|DIR",
        help="Id or name of a run, or a unique prefix; or the folder of a trace, a run, a data directory, "
        "or of verl's profile log.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="FOREBAY_DATA_DIR",
        help="Look for RUN in this data directory before asking a server.  [default: forebay-data, after the server]",
    ),
]


@dataclass(frozen=True)
class TraceSource:
    """A log on this disk."""

    title: str
    """The run's id, or the folder as given."""
    folder: Path
    """The folder has the files of a trace or, at any depth, the steps of verl's log."""
    is_verl_log: bool = False


@contextmanager
def open_source(given: str, url: str, token: str = "", data_dir: Path | None = None) -> Iterator[TraceSource]:
    """Open the log that ``given`` names. A download is removed on exit.

    Raises ``InvalidInput`` that lists what was looked for, if the run or folder does not exist or has no log.
    """
    if not given:
        raise InvalidInput("RUN|DIR is empty", hint="give a run's id or name, or a folder; `forebay status` lists runs")
    source = _of_folder(Path(given)) if Path(given).exists() else None
    if source is None and data_dir is not None:
        source = _of_data_dir(given, data_dir)
    if source is not None:
        yield source
    elif Path(given).exists() or "/" in given:
        raise _nothing(given)
    else:
        with _of_server(given, url, token, data_dir or Path("forebay-data")) as source:
            yield source


def _of_folder(folder: Path) -> TraceSource | None:
    """The log in ``folder``, of any kind; None without one."""
    if trace := find_trace(folder):
        return TraceSource(_title(trace), trace)
    if _is_verl_log(folder):
        return TraceSource(str(folder), folder, is_verl_log=True)
    runs = _runs_with_a_trace(folder)
    if len(runs) > 1:
        hint = f"name one of them: {folder / 'runs' / runs[-1].name}"
        raise InvalidInput(f"{folder} has the traces of {_listed(runs)}", hint=hint)
    return _of_folder(runs[0]) if runs else None


def _of_data_dir(given: str, data_dir: Path) -> TraceSource | None:
    """The run in ``data_dir`` whose id is ``given``, or the only one whose id begins with it."""
    runs = [run for run in _runs_with_a_trace(data_dir) if run.name.startswith(given)]
    exact = [run for run in runs if run.name == given] or runs
    if len(exact) > 1:
        raise InvalidInput(f"{given!r} could be any of {_listed(exact)}", hint="give more of the id")
    return _of_folder(exact[0]) if exact else None


@contextmanager
def _of_server(given: str, url: str, token: str, data_dir: Path) -> Iterator[TraceSource]:
    with ServerClient(url, token) as server, tempfile.TemporaryDirectory(prefix="forebay-trace-") as copy:
        try:
            run_id = server.find_run(given)["run_id"]
        except InvalidInput:  # it could be any of several
            raise
        except ForebayError as error:
            source = _of_data_dir(given, data_dir)
            if source is None:
                raise _unknown(given, url, data_dir, error) from None
        else:
            _download(server, run_id, Path(copy))
            source = TraceSource(run_id, Path(copy))
            if find_trace(source.folder) is None:
                raise InvalidInput(f"the server has no trace of {run_id}", hint="tracing may have been off when it ran")
        yield source


def _download(server: ServerClient, run_id: str, folder: Path) -> None:
    """Fetch ``GET /v1/runs/{run_id}/trace`` into a file in ``folder``.

    Raises the server's error, or ``NoServer`` if no server answers.
    """
    with (folder / "trace.jsonl").open("wb") as file:
        server.save(f"/v1/runs/{run_id}/trace", file.write)


def _unknown(given: str, url: str, data_dir: Path, error: ForebayError) -> ForebayError:
    if isinstance(error, NoServer):
        asked = f"no server answers at {url}"
    elif isinstance(error, RunNotFound):
        asked = f"the server at {url} has no such run"
    else:
        return error  # for example a wrong token
    looked_for = f"folder {given!r} does not exist, {asked}, and {data_dir}/runs has no trace of one"
    return InvalidInput(looked_for, hint="give a run's id or name, or a folder; --url and --data-dir set where to look")


def _nothing(given: str) -> InvalidInput:
    looked_for = f"{{run,gateway,server}}-*.jsonl with the head of a trace, or {_PUBLISHED}"
    if Path(given).exists():
        return InvalidInput(f"no log is in {given}: looked for {looked_for}", hint="give the folder of a run or a log")
    return InvalidInput(f"there is no folder {given!r}", hint="give a folder, or a run's id or name")


def _is_verl_log(folder: Path) -> bool:
    from forebay.telemetry.analysis.verl_log import find_steps

    return bool(find_steps(folder))


def _runs_with_a_trace(data_dir: Path) -> list[Path]:
    """Runs in ``data_dir`` with a trace, the newest last."""
    return sorted((run for run in data_dir.glob("runs/*") if find_trace(run)), key=lambda run: run.stat().st_mtime)


def _title(trace: Path) -> str:
    """Title of a trace: ``runs/RUN/trace`` is named after its run."""
    whole = trace.resolve()
    return whole.parent.name if whole.name == "trace" and whole.parent.parent.name == "runs" else str(trace)


def _listed(runs: list[Path]) -> str:
    names = [f"  {run.name}" for run in runs[-MAX_CANDIDATES:]]
    more = [f"  and {len(runs) - len(names)} older ones"] if len(runs) > len(names) else []
    return "\n".join([f"{len(runs)} runs:", *names, *more])
