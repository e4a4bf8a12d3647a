"""The main of a run process: loads the run's copy of a generator and calls its ``run_rollout``.

Started by the monitor, with the link to the server. Standard output and error are the run's log.
"""

import atexit
import inspect
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Literal, NoReturn

from forebay.core.child_process import last_line, skip_httpx_command
from forebay.core.errors import ForebayError
from forebay.core.processes.parent_link import ParentLink
from forebay.engines.bounded_replies import LIMIT_VARIABLE
from forebay.generators.discovery.module_loading import (
    import_roots,
    load_module,
    module_name,
    set_import_path,
    user_frames,
)
from forebay.generators.process.code_copy import packages_folder
from forebay.generators.process.run_logs import RUN_DIR_VARIABLE
from forebay.generators.process.spec import ReportPart, RunSpec
from forebay.telemetry.log import set_up_logging
from forebay.telemetry.tracing.records import ProcessChange
from forebay.telemetry.tracing.tracer import NO_TRACE, TraceSettings, start_tracing

STOPPED = "ended by SIGTERM: the run, or the server, was stopped\n"


def main(arguments: list[str], prepare: Callable[[RunSpec], None] = lambda _: None) -> None:
    """Run to the end; a failed or interrupted run ends at once, whatever threads are left.

    ``prepare`` is called before any of the user's code.
    """
    server = ParentLink[bytes](arguments, bytes)
    skip_httpx_command()
    # Before the user's code starts anything: the monitor may be killed, and the server has to end what is left.
    server.send(ReportPart(os_session=os.getsid(0)))
    spec = RunSpec.decode(server.receive())
    ending = _ReportAtExit(server)
    sigterm = _SigtermAsCtrlC()
    set_up_output()
    trace = _RunTrace(spec)
    try:
        prepare(spec)
        call_run_rollout(spec)
        trace.end("ended")
    except BaseException as error:  # noqa: BLE001 -- whatever the user's code raises ends the run, and is reported
        is_failure = not (isinstance(error, SystemExit) and error.code in (None, 0))
        trace.end("failed" if is_failure and not sigterm.has_come else "ended")
        if is_failure:
            # A stop is no failure: where it met the code tells nobody anything.
            is_stopped = sigterm.has_come and isinstance(error, KeyboardInterrupt)
            _fail(error, server, said=STOPPED if is_stopped else None)
    ending.is_returned = True


class _RunTrace:
    """Where the run's time is recorded, if it is traced. What its threads record later is written as they end."""

    def __init__(self, spec: RunSpec) -> None:
        settings = TraceSettings(**spec.trace) if spec.trace is not None else None
        self._tracer = start_tracing(settings, "run") if settings is not None else NO_TRACE
        self._note("started")

    def end(self, how: Literal["ended", "failed"]) -> None:
        """Write what is there: the process may be killed, or leave without any clean-up."""
        self._note(how)
        self._tracer.flush()

    def _note(self, what: Literal["started", "ended", "failed"]) -> None:
        self._tracer.write(ProcessChange(t=self._tracer.now(), what=what))


class _ReportAtExit:
    """Reports the return of ``run_rollout`` when all it left behind has ended too.

    Registered before user code, so called after everything else: by then the threads and the multiprocessing children
    have been waited for. What goes wrong later, while the interpreter is taken down, is no failure of the run.
    """

    def __init__(self, server: ParentLink[bytes]) -> None:
        self.is_returned = False
        self._server = server
        self._pid = os.getpid()
        atexit.register(self)

    def __call__(self) -> None:
        if self.is_returned and os.getpid() == self._pid:
            self._server.send(ReportPart(is_returned=True))


def call_run_rollout(spec: RunSpec) -> None:
    """Load the run's copy of the generator, and return when its ``run_rollout`` has."""
    module_path = Path(spec.module_path)
    original = Path(spec.original_folder)
    os.environ[RUN_DIR_VARIABLE] = str(module_path.parents[1])
    os.environ[LIMIT_VARIABLE] = str(spec.max_engine_reply_bytes)
    module = sys.modules.get(module_name(module_path))
    if getattr(module, "__file__", None) != str(module_path):  # else an inline worker: its classes are the lead's
        set_import_path(module_path.parent, packages_folder(module_path), original, *import_roots(original))
        module = load_module(module_path)
    result = module.run_rollout(spec.payload)  # type: ignore[union-attr]
    if inspect.iscoroutine(result):
        import asyncio  # half of what a run process loads

        asyncio.run(result)


class _SigtermAsCtrlC:
    """asyncio turns SIGINT into a clean cancellation, and knows nothing of SIGTERM."""

    def __init__(self) -> None:
        self.has_come = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._interrupt)
        # What the user's code forks keeps the plain meaning: multiprocessing ends its workers with SIGTERM.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))

    def _interrupt(self, *_: object) -> None:
        self.has_come = True
        signal.raise_signal(signal.SIGINT)


def set_up_output() -> None:
    """What this process prints and logs goes to the run's log, line by line."""
    set_up_logging("info")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Half a surrogate pair in a print must not end the run. With PYTHONUNBUFFERED, a line and its end would be
            # two writes, between which another worker's line may come.
            stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")


def _fail(error: BaseException, server: ParentLink[bytes], *, said: str | None = None) -> NoReturn:
    """End the run with ``error``, of which the log says what is ``said``, else everything."""
    text = "".join(traceback.format_exception(type(error), error, user_frames(error.__traceback__, __file__)))
    error_line = last_line(text)
    if isinstance(error, ForebayError) and error.hint:
        text += f"field: {error.field}\n" if error.field else ""
        text += f"hint: {error.hint}\n"
    sys.stderr.write(text if said is None else said)
    encodable = (each.encode(errors="backslashreplace").decode() for each in (error_line, text))
    with suppress(OSError):  # the server is gone
        server.send(ReportPart(0, False, *encodable))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
