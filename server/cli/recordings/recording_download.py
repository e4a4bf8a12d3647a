"""A run that a server has, as the file of a recording."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from urllib.parse import urlencode

from forebay.core.errors import InvalidInput
from forebay.core.records.recording_rows import EndRow
from forebay.replay.options import SUFFIX, parse_steps
from forebay.replay.recording import Recording
from forebay.replay.recording_export import NewRecording
from forebay.server.cli.client import ServerClient


def export_run(server: ServerClient, run: str, path: Path, steps: str = "") -> EndRow:
    """Write the run that ``run`` names into the new file ``path``; what it has.

    Raises ``InvalidInput`` for a file that is there, steps that are none, or a ``run`` that several have; what the
    server refuses; ``StorageFailed``, ``MissingExtra``.
    """
    if steps:
        parse_steps(steps, "--steps")
    with NewRecording(path) as new:
        run_id = server.find_run(run)["run_id"]
        asked = f"?{urlencode({'steps': steps})}" if steps else ""
        server.save(f"/v1/runs/{run_id}/recording{asked}", new.write)
    return new.made


def is_recording(given: str) -> bool:
    """Whether a command is given a file, and not a run: its name ends so, it is a path, or it is there."""
    return given.endswith(SUFFIX) or len(PurePath(given).parts) > 1 or Path(given).is_file()


@contextmanager
def open_recording_of(given: str, url: str, token: str = "", steps: str = "") -> Iterator[Recording]:
    """The recording in the file ``given``, or, fetched for so long, of the run that it names.

    With ``steps``, only those are fetched; of a file, all is there. Raises as ``Recording`` and ``export_run`` do.
    """
    if not given:
        raise InvalidInput("RUN|FILE is empty", hint="give a run's id or name, or the file of a recording")
    if is_recording(given):
        with Recording.open(given) as recording:
            yield recording
        return
    with tempfile.TemporaryDirectory(prefix="forebay-recording-") as folder:
        path = Path(folder) / f"{PurePath(given).name}{SUFFIX}"
        with ServerClient(url, token) as server:
            export_run(server, given, path, steps)
        with Recording.open(path) as recording:
            yield recording
