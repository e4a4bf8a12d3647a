"""Events of the trace-event format, a line each, into a file that is a valid whole once it is closed.

The file is an array. Viewers open it before its end was written, too: while a run goes on.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec

from forebay.telemetry.export.attempt_tracks import TrackSpan, tracks

TRAINER = 1
PROCESSES = 2
_FIRST_ENGINE = 100
_FIRST_GROUP = 10_000
Arrow = tuple[str, str]
"""``flow_out`` or ``flow_in``, and the id that both ends share."""


class TraceEvents:
    """Writes events to ``file``. A viewer shows each ``pid`` as a process with tracks of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_first = True
        self._zero = 0
        self._pids: dict[str, dict[str, int]] = {}
        self._named: set[int] = set()

    def begin_at(self, zero: int) -> None:
        """Say which moment is 0: times of years do not fit into a viewer's numbers."""
        self._zero = zero
        begins = datetime.fromtimestamp(zero / 1e9, UTC).isoformat()
        self._write(ph="M", name="process_labels", pid=TRAINER, args={"labels": f"0 is {begins}"})

    def trainer(self) -> int:
        """The process of the trainer's reads and weights."""
        return self._named_pid(TRAINER, "trainer")

    def processes(self) -> int:
        """That of what the run's processes say of themselves."""
        return self._named_pid(PROCESSES, "processes")

    def engine(self, url: str) -> int:
        """That of an engine's calls."""
        return self._named_pid(self._pid("engine", url, _FIRST_ENGINE), f"engine {url}")

    def group(self, group: str) -> int:
        """That of a group's rollouts."""
        return self._named_pid(self._pid("group", group, _FIRST_GROUP), f"group {group}")

    def nested(
        self, pid: int, category: str, spans: Iterable[TrackSpan], root: TrackSpan, arrows: dict[str, Arrow]
    ) -> None:
        """``root`` and all that lies in it; ``arrows`` by the id of the span at which they begin or end."""
        for number, edges in enumerate(tracks(spans, root)):
            track = {"local": f"{root.id}.{number}"}
            for is_begin, span in edges:
                name = f"{span.name} (open)" if span.is_open else span.name
                common: dict[str, Any] = {"cat": category, "id2": track, "pid": pid, "tid": 0, "name": name}
                if not is_begin:
                    self._write(ph="e", ts=self._us(span.end), **common)
                    continue
                if arrow := arrows.get(span.id):
                    common |= {"bind_id": f"0x{arrow[1]}", arrow[0]: True}
                about = span.about | ({"open": True} if span.is_open else {})
                self._write(ph="b", ts=self._us(span.begin), **common, args=about)

    def moment(self, pid: int, name: str, at: int, **about: Any) -> None:
        """Something that took no time."""
        self._write(ph="i", s="p", ts=self._us(at), pid=pid, tid=0, name=name, args=about)

    def close(self) -> None:
        """Write the end. The file stays open."""
        self._file.write(b"[]\n" if self._is_first else b"\n]\n")
        self._file.flush()

    def _pid(self, kind: str, name: str, first: int) -> int:
        known = self._pids.setdefault(kind, {})
        return known.setdefault(name, first + len(known))

    def _named_pid(self, pid: int, name: str) -> int:
        if pid not in self._named:
            self._named.add(pid)
            self._write(ph="M", name="process_name", pid=pid, args={"name": name})
            self._write(ph="M", name="process_sort_index", pid=pid, args={"sort_index": pid})
        return pid

    def _us(self, ns: int) -> float:
        return (ns - self._zero) / 1e3

    def _write(self, **event: Any) -> None:
        self._file.write(b"[\n" if self._is_first else b",\n")
        self._is_first = False
        self._file.write(msgspec.json.encode(event))
