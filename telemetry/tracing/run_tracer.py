"""Records one run in one process. The process's only ``FlushThread`` writes the records to the file."""

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
from typing import TYPE_CHECKING

import msgspec

from forebay.telemetry.tracing.attempt_trace import AttemptTrace
from forebay.telemetry.tracing.records import VERSION, Head, LoopStall, Process, Record
from forebay.telemetry.tracing.spans import Scope
from forebay.telemetry.tracing.trace_file import RecordQueue, TraceFile, segment_bytes
from forebay.telemetry.tracing.trace_ids import is_kept

if TYPE_CHECKING:  # as in ``records``
    from forebay.telemetry.tracing.stall_watch import Stall

logger = logging.getLogger(__name__)

EVERY_S = 0.5
"""Interval between writes."""
_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


class TraceSettings(msgspec.Struct):
    """What a process needs to record a run."""

    folder: str
    run_id: str
    start: int = 1
    """The start of the run that is recorded."""
    rate: float = 1.0
    """The share of groups whose spans are kept."""
    max_bytes: int = 256 << 20
    """Limit for the whole folder; 0: only summaries are kept."""


OpenFile = Callable[[TraceSettings, Head], TraceFile]


def trace_file_of(settings: TraceSettings, head: Head) -> TraceFile:
    """The file in the run's folder to which a process appends."""
    return TraceFile(Path(settings.folder), head, segment_bytes(settings.max_bytes))


class FlushThread:
    """The only thread of a process that writes traces: every half second it flushes all tracers.

    Started with the first record, and in a forked process again with its first record.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._tracers: list[Tracer] = []
        self.all: weakref.WeakSet[Tracer] = weakref.WeakSet()
        """Their ``after_fork`` is called in every forked process, whether or not they have records."""
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self._flush_all)

    def see_to(self, tracer: "Tracer") -> None:
        """Flush ``tracer`` regularly from now on."""
        with self._lock:
            if tracer not in self._tracers:
                self._tracers.append(tracer)
            if self._thread is None:
                self._flush_at_end()
                thread = threading.Thread(target=self._run, name="trace", daemon=True)
                # An interpreter that is shutting down starts no thread; the records are then written at exit.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def leave(self, tracer: "Tracer") -> None:
        """Stop flushing ``tracer``."""
        with self._lock, suppress(ValueError):
            self._tracers.remove(tracer)

    def hurry(self) -> None:
        """Flush soon, because many records are waiting."""
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
        except Exception:  # an error in one trace must not end the others
            self.leave(tracer)
            logger.exception("a trace ends here after an error; rollouts continue")

    def _flush_all(self) -> None:
        for tracer in list(self._tracers):
            tracer.flush()

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = None
        self._tracers = []
        for tracer in self.all:
            tracer.after_fork()

    def _flush_at_end(self) -> None:
        """Also flush in children of ``multiprocessing``, which exit without running ``atexit``."""
        module = sys.modules.get("multiprocessing.util")
        if module is None:
            return
        from multiprocessing import parent_process

        if parent_process() is not None:
            module.Finalize(None, self._flush_all, exitpriority=0)


FLUSH_THREAD = FlushThread()
"""The thread of this process."""


class Tracer:
    """Takes records from any thread. Never raises or blocks. After a full disk or ``close`` it drops all records."""

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
        """Held while writing to the file."""
        self._scopes: weakref.WeakValueDictionary[int, Scope] = weakref.WeakValueDictionary()
        self.has_ended = False
        """Whether records are dropped: after ``close`` or a write error."""
        self._is_seen_to = False
        self.on_close: Callable[[Tracer], None] | None = None
        FLUSH_THREAD.all.add(self)

    def now(self) -> int:
        """Nanoseconds since the Unix epoch, on the monotonic clock."""
        return time.monotonic_ns() + self._offset

    def at(self, monotonic_s: float) -> int:
        """Convert an earlier ``time.monotonic()`` to ``now``'s clock."""
        return int(monotonic_s * 1e9) + self._offset

    def note_stall(self, stall: "Stall") -> None:
        """Record that an event loop of this process is or was blocked."""
        self.write(LoopStall.of(stall, self._offset))

    def write(self, record: Record) -> None:
        """Add a record, which is written within half a second."""
        if self.has_ended:
            return
        self._queue.put(record)
        if not self._is_seen_to:
            self._be_seen_to()

    def attempt(
        self,
        uid: str,
        group: str,
        attempt: int,
        begun: int | None = None,
        id: str = "",  # noqa: A002 - the name of the record's field
    ) -> AttemptTrace:
        """The trace of one attempt. ``id``: of its span, if another process opened it."""
        kept = is_kept(group, self.rate)
        return AttemptTrace(self, uid=uid, group=group, attempt=attempt, begun=begun, id=id, is_kept=kept)

    def run_scope(self) -> Scope:
        """The scope for spans outside rollouts."""
        return Scope(self, is_kept=self.rate > 0)

    def close(self) -> None:
        """Write the waiting records and accept no more."""
        if not self.has_ended:
            self.flush()
        self._end()

    def watch(self, scope: Scope) -> None:
        """Record spans of ``scope`` that last long, while the scope is referenced elsewhere."""
        self._scopes[id(scope)] = scope
        if not self._is_seen_to and not self.has_ended:
            self._be_seen_to()

    def flush(self) -> None:
        """Write the waiting records."""
        with self._lock:
            if self.has_ended:
                return
            try:
                while lines := self._queue.take_lines(self.now()):
                    self._file.append(lines)
            except Exception as error:  # noqa: BLE001 - usually a full disk; no error may cost a rollout
                self.has_ended = True
                logger.warning("the trace of %s ends here, its rollouts continue: %s", self.run_id, error)
        if self.has_ended:
            self._end()

    def rest(self) -> None:
        """Write the waiting records and close the file. The next record starts another segment."""
        self.flush()
        FLUSH_THREAD.leave(self)
        with self._lock:
            self._file.close()
            self._is_seen_to = False
        if len(self._queue):  # added meanwhile, and not flushed by anything else
            self._be_seen_to()

    def note_long(self) -> None:
        """Record spans that have been open for long."""
        now = self.now()
        for scope in self._living():
            scope.note_long(now)

    def after_fork(self) -> None:
        """Reset a forked process: waiting records and open spans belong to the parent. It gets its own file later."""
        self._lock = threading.Lock()
        self._queue = RecordQueue(FLUSH_THREAD.hurry)
        self._file.close()
        self._file = self._new_file()
        self._is_seen_to = False
        for scope in self._living():
            scope.forget_open()

    def _living(self) -> list[Scope]:
        return [scope for reference in self._scopes.valuerefs() if (scope := reference()) is not None]

    def _be_seen_to(self) -> None:
        self._is_seen_to = True
        FLUSH_THREAD.see_to(self)

    def _end(self) -> None:
        self.has_ended = True
        with self._lock:
            self._file.close()
            self._queue = RecordQueue(FLUSH_THREAD.hurry)
        FLUSH_THREAD.leave(self)
        if self.on_close is not None:
            self.on_close(self)

    def _new_file(self) -> TraceFile:
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
    """Id of this machine's boot; "" if the system does not provide one."""
    try:
        return _BOOT_FILE.read_text().strip()
    except (OSError, ValueError):
        return ""
