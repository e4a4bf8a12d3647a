"""Downloads a run from the server as the file of a recording."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from urllib.parse import urlencode

from forebay.core.errors import InvalidInput
from forebay.core.records.recording_rows import EndRow
from forebay.replay.options import SUFFIX, parse_steps
from forebay.replay.recording import Recording
from forebay.replay.recording_export import NewRecording
from forebay.server.cli.client import ServerClient


def export_run(
    server: ServerClient, run: str, path: Path, steps: str = "", groups: Sequence[str] = (), **flags: bool
) -> EndRow:
    """Write the run that ``run`` names into the new file ``path``; return its counts.

    ``steps`` and ``groups`` select groups; ``flags`` are those of the route.
    Raises ``InvalidInput`` for an existing file, invalid steps, or an ambiguous ``run``; any error of the server;
    ``StorageFailed``, ``MissingExtra``.
    """
    if steps:
        parse_steps(steps, "--steps")
    with NewRecording(path) as new:
        run_id = server.find_run(run)["run_id"]
        asked = [("steps", steps)] * bool(steps) + [("groups", each) for each in groups] + [*flags.items()]
        server.save(f"/v1/runs/{run_id}/recording?{urlencode(asked)}", new.write)
    return new.made


def is_recording(given: str) -> bool:
    """Whether ``given`` is a file, not a run: it has a recording's ending, is a path, or exists."""
    return given.endswith(SUFFIX) or len(PurePath(given).parts) > 1 or Path(given).is_file()


@contextmanager
def open_recording_of(
    given: str,
    url: str,
    token: str = "",
    steps: str = "",
    groups: Sequence[str] = (),
    *,
    folder: Path | None = None,
    **flags: bool,
) -> Iterator[Recording]:
    """Open the recording in the file ``given``, or of the run that it names, downloaded for the duration.

    ``steps``, ``groups`` and ``flags`` limit a download, which needs room in ``folder``; a file is not limited. Raises
    as ``Recording`` and ``export_run`` do.
    """
    if not given:
        raise InvalidInput("RUN|FILE is empty", hint="give a run's id or name, or the file of a recording")
    if is_recording(given):
        with Recording.open(given) as recording:
            yield recording
        return
    with tempfile.TemporaryDirectory(prefix=".forebay-recording-", dir=folder) as made:
        path = Path(made) / f"{PurePath(given).name}{SUFFIX}"
        with ServerClient(url, token) as server:
            export_run(server, given, path, steps, groups, **flags)
        with Recording.open(path) as recording:
            yield recording
