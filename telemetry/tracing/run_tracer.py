"""One run as one process records it: takes records, which the process's one ``FlushThread`` has written to the file."""

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from forebay.telemetry.tracing.attempt_trace import AttemptTrace
from forebay.telemetry.tracing.record_queue import RecordQueue
from forebay.telemetry.tracing.records import VERSION, Head, LoopStall, Process, Record
from forebay.telemetry.tracing.spans import Scope
from forebay.telemetry.tracing.trace_file import TraceFile, segment_bytes
from forebay.telemetry.tracing.trace_ids import is_kept

if TYPE_CHECKING:  # as in ``records``
    from forebay.telemetry.tracing.stall_watch import Stall

logger = logging.getLogger(__name__)

EVERY_S = 0.5
"""How often what has been recorded is written."""
_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


class TraceSettings(msgspec.Struct):
    """What a process is told that is to record a run."""

    folder: str
    run_id: str
    start: int = 1
    """The run's start that is recorded."""
    rate: float = 1.0
    """The share of groups whose spans are kept."""
    max_bytes: int = 256 << 20
    """Of the whole folder; 0: summaries only."""


class LineFile(Protocol):
    """Where a tracer's lines go."""

    def append(self, lines: bytes) -> None:
        """Append whole lines. Raises what ends the trace."""

    def close(self) -> None:
        """Nothing more comes for now."""


OpenFile = Callable[[TraceSettings, Head], LineFile]


def trace_file_of(settings: TraceSettings, head: Head) -> TraceFile:
    """The one that a process appends to in the run's folder."""
    return TraceFile(Path(settings.folder), head, segment_bytes(settings.max_bytes))


class FlushThread:
    """The one thread of a process that writes traces: every half second it sees to all tracers.

    Started with the first record; in a forked process again, once there is one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._tracers: list[Tracer] = []
        self._all: weakref.WeakSet[Tracer] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self._flush_all)

    def know(self, tracer: "Tracer") -> None:
        """Tell ``tracer`` in every forked process, whether there is something to write or not."""
        self._all.add(tracer)

    def see_to(self, tracer: "Tracer") -> None:
        """Write what ``tracer`` has, now and then, from now on."""
        with self._lock:
            if tracer not in self._tracers:
                self._tracers.append(tracer)
            if self._thread is None:
                self._flush_at_end()
                thread = threading.Thread(target=self._run, name="trace", daemon=True)
                # An interpreter that ends starts none; what is there is then written at its end.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def leave(self, tracer: "Tracer") -> None:
        """Forget ``tracer``."""
        with self._lock:
            if tracer in self._tracers:
                self._tracers.remove(tracer)

    def hurry(self) -> None:
        """Write soon: much is waiting."""
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            for tracer in list(self._tracers):
                self._see_to_one(tracer)

    def _see_to_one(self, tracer: "Tracer") -> None:
        try:
            tracer.note_long()
            tracer.flush()
        except Exception:  # what goes wrong with one trace must not end those of all others
            self.leave(tracer)
            logger.exception("a trace ends here, the rollouts go on")

    def _flush_all(self) -> None:
        for tracer in list(self._tracers):
            tracer.flush()

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = None
        self._tracers = []
        for tracer in self._all:
            tracer.after_fork()

    def _flush_at_end(self) -> None:
        """The children of ``multiprocessing`` leave without the functions of ``atexit``."""
        module = sys.modules.get("multiprocessing.util")
        if module is None:
            return
        from multiprocessing import parent_process

        if parent_process() is not None:
            module.Finalize(None, self._flush_all, exitpriority=0)


FLUSH_THREAD = FlushThread()
"""That of this process."""


class Tracer:
    """Takes records from any thread. Never raises, never blocks; after a full disk or ``close`` it keeps nothing."""

    def __init__(self, settings: TraceSettings, process: Process, open_file: OpenFile = trace_file_of) -> None:
        self.settings = settings
        self._open_file = open_file
        self.process = process
        self.run_id = settings.run_id
        self.rate = settings.rate if settings.max_bytes > 0 else 0.0
        self._wall_ns, self._mono_ns = time.time_ns(), time.monotonic_ns()
        self._offset = self._wall_ns - self._mono_ns
        self._queue = RecordQueue(FLUSH_THREAD.hurry)
        self._file = self._new_file()
        self._lock = threading.Lock()
        """Held while the file is written."""
        self._scopes: dict[int, weakref.ref[Scope]] = {}
        self._is_over = False
        self._is_seen_to = False
        self.on_close: Callable[[Tracer], None] | None = None
        FLUSH_THREAD.know(self)

    def now(self) -> int:
        """Nanoseconds since the Unix epoch, on the monotonic clock."""
        return time.monotonic_ns() + self._offset

    def at(self, monotonic_s: float) -> int:
        """The same for a ``time.monotonic()`` of before."""
        return int(monotonic_s * 1e9) + self._offset

    def note_stall(self, stall: "Stall") -> None:
        """An event loop of this process stands still, or did."""
        self.write(LoopStall.of(stall, self._offset))

    def write(self, record: Record) -> None:
        """Take one record; it is in the file within half a second."""
        if self._is_over:
            return
        self._queue.put(record)
        if not self._is_seen_to:
            self._is_seen_to = True
            FLUSH_THREAD.see_to(self)

    def attempt(
        self,
        uid: str,
        group: str,
        attempt: int,
        begun: int | None = None,
        id: str = "",  # noqa: A002 - as the field of the record is called
    ) -> AttemptTrace:
        """The trace of one attempt; ``id``: of its span, where another process has opened it."""
        kept = is_kept(group, self.rate)
        return AttemptTrace(self, uid=uid, group=group, attempt=attempt, begun=begun, id=id, is_kept=kept)

    def run_scope(self) -> Scope:
        """For spans that belong to no rollout."""
        return Scope(self, is_kept=self.rate > 0)

    def close(self) -> None:
        """Write what is there, and take nothing any more."""
        if not self._is_over:
            self.flush()
        self._end()

    def watch(self, scope: Scope) -> None:
        """Note what lasts long in ``scope``, for as long as somebody has it."""
        key = id(scope)
        self._scopes[key] = weakref.ref(scope, lambda _: self._scopes.pop(key, None))
        if not self._is_seen_to and not self._is_over:
            self._is_seen_to = True
            FLUSH_THREAD.see_to(self)

    def flush(self) -> None:
        """Write what is there."""
        with self._lock:
            if self._is_over:
                return
            try:
                while lines := self._queue.take_lines(self.now()):
                    self._file.append(lines)
            except Exception as error:  # noqa: BLE001 - a full disk, as a rule; no error at all may cost a rollout
                self._is_over = True
                logger.warning("the trace of %s ends here, its rollouts go on: %s", self.run_id, error)
        if self._is_over:
            self._end()

    @property
    def has_ended(self) -> bool:
        """Whether nothing is kept any more: after ``close``, or because the disk took no more."""
        return self._is_over

    def rest(self) -> None:
        """Write what is there and close the file; the next record begins another segment."""
        self.flush()
        FLUSH_THREAD.leave(self)
        with self._lock:
            self._file.close()
            self._is_seen_to = False
        if len(self._queue):  # it came meanwhile, and nobody else would write it
            self._is_seen_to = True
            FLUSH_THREAD.see_to(self)

    def note_long(self) -> None:
        """Note what has been open for long."""
        now = self.now()
        for reference in list(self._scopes.values()):
            scope = reference()
            if scope is not None:
                scope.note_long(now)

    def after_fork(self) -> None:
        """In a forked process: what is waiting and what is open is the parent's; a file of its own comes later."""
        self._lock = threading.Lock()
        self._queue = RecordQueue(FLUSH_THREAD.hurry)
        self._file.close()
        self._file = self._new_file()
        self._is_seen_to = False
        for reference in list(self._scopes.values()):
            scope = reference()
            if scope is not None:
                scope.forget_open()

    def _end(self) -> None:
        self._is_over = True
        with self._lock:
            self._file.close()
            self._queue.clear()
        FLUSH_THREAD.leave(self)
        if self.on_close is not None:
            self.on_close(self)

    def _new_file(self) -> LineFile:
        settings = self.settings
        head = Head(
            version=VERSION,
            run_id=self.run_id,
            process=self.process,
            start=settings.start,
            pid=os.getpid(),
            wall_ns=self._wall_ns,
            mono_ns=self._mono_ns,
            boot=_boot(),
        )
        return self._open_file(settings, head)


@cache
def _boot() -> str:
    """Of this machine since it is up, another one each time; "" where the system does not tell."""
    try:
        return _BOOT_FILE.read_text().strip()
    except (OSError, ValueError):
        return ""
