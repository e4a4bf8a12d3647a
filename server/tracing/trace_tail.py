"""What the other processes of a run add to its trace, read on from where it was read last: for ``/metrics``.

Only summaries and what was dropped are decoded; of all other lines nothing but the beginning is looked at.
"""

from collections import Counter, defaultdict
from pathlib import Path
from typing import BinaryIO

import msgspec

from forebay.core.files import regular_opener
from forebay.telemetry.tracing.read_trace import bounded_lines, trace_files
from forebay.telemetry.tracing.records import PHASES
from forebay.telemetry.tracing.trace_file import FOREIGN_BYTES

MAX_OTHER_PHASES = 32
"""So many names that users' code gave are told apart; Prometheus keeps a series for each."""
OTHER = "other"
_NS = 1e9


class _Summary(msgspec.Struct):
    """What is wanted of a ``RolloutSummary``."""

    phases: dict[str, int] = {}


class _Dropped(msgspec.Struct):
    """What is wanted of a ``Dropped``."""

    spans: int = 0
    summaries: int = 0


_decode_summary = msgspec.json.Decoder(_Summary).decode
_decode_dropped = msgspec.json.Decoder(_Dropped).decode


class TraceTail:
    """Sums over all runs since the server started. Used by one thread at a time."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Of rollouts, by phase."""
        self._read: dict[Path, int] = {}
        self._others: set[str] = set()

    def skip(self, folder: Path) -> None:
        """What is there already is of an earlier life of the server."""
        for path in trace_files(folder):
            self._read[path] = path.stat().st_size

    def read(self, folder: Path, dropped: Counter[str]) -> None:
        """Add what has come since, and to ``dropped`` what processes say that they could not write.

        Half a line at the end of a file waits for its other half.
        """
        paths = trace_files(folder)
        for path in paths:
            try:
                # A run has a file for each process that has ever recorded; nearly all of them say no more.
                if self._read.get(path, 0) != path.stat().st_size <= FOREIGN_BYTES:
                    with open(path, "rb", opener=regular_opener) as file:
                        self._read_on(path, file, dropped)
            except OSError:  # the budget took it, or the run's own code has put something else there
                continue
        for gone in [path for path in self._read if path.parent == folder and path not in paths]:
            del self._read[gone]

    def _read_on(self, path: Path, file: BinaryIO, dropped: Counter[str]) -> None:
        size, offset = path.stat().st_size, self._read.get(path, 0)
        if size < offset:  # its spans were taken out; it is closed, and was read to its end before
            self._read[path] = size
        if size <= offset:
            return
        file.seek(offset)
        for num_bytes, line in bounded_lines(file):
            if line.endswith(b"\n"):
                self._read[path] = offset = offset + num_bytes
                self._take(line, dropped)

    def _take(self, line: bytes, dropped: Counter[str]) -> None:
        try:
            if line.startswith(b'{"kind":"rollout"'):
                for phase, ns in _decode_summary(line).phases.items():
                    self.seconds[self._name(phase)] += max(0, ns) / _NS
            elif line.startswith(b'{"kind":"dropped"'):
                lost = _decode_dropped(line)
                dropped.update(spans=lost.spans, summaries=lost.summaries)
        except (msgspec.DecodeError, ValueError):  # a broken line: the report names it
            return

    def _name(self, phase: str) -> str:
        if phase in PHASES or phase in self._others:
            return phase
        if len(self._others) >= MAX_OTHER_PHASES:
            return OTHER
        self._others.add(phase)
        return phase
