"""A copy of a trace that a server has: the stream of its lines, as files again."""

from pathlib import Path

from forebay.server.cli.client import ServerClient
from forebay.telemetry.tracing.read_trace import decode_line
from forebay.telemetry.tracing.records import Head


class TraceDownload:
    """Fetches ``GET /v1/runs/{run_id}/trace`` into ``folder``, one file for each head, named as at the server."""

    def __init__(self, server: ServerClient, run_id: str, folder: Path) -> None:
        self._server = server
        self._run_id = run_id
        self._folder = folder

    def refresh(self) -> None:
        """Fetch it anew. Raises what the server says, ``NoServer`` if none answers."""
        stream = self._folder / "stream"
        with stream.open("wb") as file:
            self._server.save(f"/v1/runs/{self._run_id}/trace", file)
        _split(stream, self._folder)
        stream.unlink()


def _split(stream: Path, folder: Path) -> None:
    """Each head begins a file of its own. One that is there already is replaced: it can only have grown."""
    target, seen = None, set[str]()
    try:
        with stream.open("rb") as lines:
            for line in lines:
                head = decode_line(line) if b'"head"' in line else None
                if isinstance(head, Head) or target is None:
                    if target is not None:
                        target.close()
                    name = _name(head)
                    target = (folder / name).open("ab" if name in seen else "wb")
                    seen.add(name)
                target.write(line)
    finally:
        if target is not None:
            target.close()


def _name(head: object) -> str:
    if isinstance(head, Head):
        return f"{head.process}-{head.start}-{head.pid}.{head.number}.jsonl"
    return "run-0-0.0.jsonl"  # what comes before any head is still read, and named when it is broken
