"""Main of a run process: loads the run's copy of a generator and calls its ``run_rollout``.

The monitor starts it with the link to the server. Standard output and error go to the run's log.
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
from forebay.core.errors import ForebayError, InvalidInput
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
    """Run to the end. A failed or interrupted run ends at once, even if threads are left.

    ``prepare`` is called before any user code.
    """
    server = ParentLink[bytes](arguments, bytes)
    skip_httpx_command()
    # Sent before user code starts processes: if the monitor is killed, the server has to end them.
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
    except BaseException as error:  # noqa: BLE001 -- any error of user code ends the run and is reported
        is_failure = not (isinstance(error, SystemExit) and error.code in (None, 0))
        trace.end("failed" if is_failure and not sigterm.has_come else "ended")
        if is_failure:
            # A stop is not a failure: a traceback of where it happened would not help.
            is_stopped = sigterm.has_come and isinstance(error, KeyboardInterrupt)
            _fail(error, server, said=STOPPED if is_stopped else None)
    ending.is_returned = True


class _RunTrace:
    """Trace of the run, if it is traced. Spans that threads record later are written when the threads end."""

    def __init__(self, spec: RunSpec) -> None:
        settings = TraceSettings(**spec.trace) if spec.trace is not None else None
        self._tracer = start_tracing(settings, "run") if settings is not None else NO_TRACE
        self._note("started")

    def end(self, how: Literal["ended", "failed"]) -> None:
        """Flush the trace, because the process may be killed or exit without clean-up."""
        self._note(how)
        self._tracer.flush()

    def _note(self, what: Literal["started", "ended", "failed"]) -> None:
        self._tracer.write(ProcessChange(t=self._tracer.now(), what=what))


class _ReportAtExit:
    """Reports the return of ``run_rollout`` once its threads and child processes have ended too.

    Registered before user code, and therefore called last, after the threads and multiprocessing children were joined.
    Later errors, while the interpreter shuts down, do not fail the run.
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
    """Load the run's copy of the generator and call its ``run_rollout``."""
    module_path = Path(spec.module_path)
    original = Path(spec.original_folder)
    os.environ[RUN_DIR_VARIABLE] = str(module_path.parents[1])
    os.environ[LIMIT_VARIABLE] = str(spec.max_engine_reply_bytes)
    module = sys.modules.get(module_name(module_path))
    if getattr(module, "__file__", None) != str(module_path):  # an inline worker shares the lead's module and classes
        set_import_path(module_path.parent, packages_folder(module_path), original, *import_roots(original))
        module = load_module(module_path)
    result = module.run_rollout(spec.payload)  # type: ignore[union-attr]
    if inspect.iscoroutine(result):
        import asyncio  # half of a run process's imports

        asyncio.run(result)


class _SigtermAsCtrlC:
    """Turns SIGTERM into SIGINT, for which asyncio cancels tasks cleanly."""

    def __init__(self) -> None:
        self.has_come = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._interrupt)
        # Forked processes keep the default action: multiprocessing ends its workers with SIGTERM.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))

    def _interrupt(self, *_: object) -> None:
        self.has_come = True
        signal.raise_signal(signal.SIGINT)


def set_up_output() -> None:
    """Write output and log messages of this process to the run's log line by line."""
    set_up_logging("info")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Lone surrogates in output must not end the run. With PYTHONUNBUFFERED, a line and its newline would be two
            # writes, between which another worker may write.
            stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")


def _fail(error: BaseException, server: ParentLink[bytes], *, said: str | None = None) -> NoReturn:
    """End the run with ``error``. Logs ``said`` if given, else the whole traceback."""
    text = "".join(traceback.format_exception(type(error), error, user_frames(error.__traceback__, __file__)))
    error_line = last_line(text)
    if isinstance(error, ForebayError) and error.hint:
        text += f"field: {error.field}\n" if error.field else ""
        text += f"hint: {error.hint}\n"
    sys.stderr.write(text if said is None else said)
    said_line, said_text = (each.encode(errors="backslashreplace").decode() for each in (error_line, text))
    with suppress(OSError):  # the server is gone
        server.send(ReportPart(0, False, said_line, said_text, isinstance(error, InvalidInput)))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
