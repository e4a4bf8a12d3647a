"""Who wrote the lines of a trace: a process in each of its files. All of their times are brought to one clock."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from forebay.telemetry.tracing.records import Head, Read, Record, RolloutSummary

_READ_TIMES = ("last_asked", "satisfied", "judged", "first_byte", "sent")


@dataclass(slots=True)
class Writer:
    """A process that wrote, in one of its files."""

    file: str
    head: Head | None = None
    """None for lines in front of any head."""
    shift_ns: int = 0
    """What brings its times to the clock of the first process."""
    last_ns: int = 0
    """Its last sign of life."""
    ended_ns: int = 0
    """When its process had ended, as the server saw it; 0 where nothing says so."""

    @property
    def name(self) -> str:
        """The name that its file was given when it was written."""
        head = self.head
        return f"{head.process}-{head.start}-{head.pid}.{head.number}.jsonl" if head else Path(self.file).name

    @property
    def process(self) -> str:
        """``run``, ``gateway`` or ``server``."""
        return self.head.process if self.head else ""

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.head.pid if self.head else 0


class TraceLine(NamedTuple):
    """A record, and where it stands."""

    writer: Writer
    number: int
    """From 1, as editors count."""
    record: Record
    """Its times are on the clock that all writers share."""


def shift(record: Record, ns: int) -> None:
    """Move all moments of ``record`` by ``ns``."""
    record.t += ns  # type: ignore[union-attr]  # no head comes here
    if isinstance(record, Read):
        for name in _READ_TIMES:
            if moment := getattr(record, name):
                setattr(record, name, moment + ns)
    elif isinstance(record, RolloutSummary):
        record.started += ns if record.started else 0
        for turn in record.turns:
            turn.t += ns


class SharedClock:
    """The heads of all processes, which have one monotonic clock while the machine is up.

    Each anchored it to the wall by itself. Where the wall's clock was set between two heads, the later process's times
    are off by that much: its monotonic clock says by how much.
    """

    def __init__(self) -> None:
        self._firsts: list[Head] = []
        """Of each time that a machine was up."""

    def shift(self, head: Head) -> int:
        """What is to be added to the times of the process with this head."""
        for first in self._firsts:
            if not _is_other_boot(first, head):
                return (first.wall_ns - first.mono_ns) - (head.wall_ns - head.mono_ns)
        self._firsts.append(head)
        return 0


def _is_other_boot(first: Head, head: Head) -> bool:
    """Whether the machine was booted between the two, or each is of another one.

    Where heads do not say: the later one's monotonic clock began after the earlier head.
    """
    if first.boot and head.boot:
        return first.boot != head.boot
    earlier, later = sorted((first, head), key=lambda each: each.wall_ns)
    return later.wall_ns - later.mono_ns > earlier.wall_ns
