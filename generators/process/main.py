"""The main of a run process: loads the run's copy of a generator and calls its ``run_rollout``.

``python -m forebay.generators.process.main SPEC_FD REPORT_FD PARENT_PID``. Standard output and error are the run's log.
"""

import atexit
import inspect
import logging
import os
import signal
import sys
import traceback
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from forebay.core.child_process import die_with_parent
from forebay.core.errors import ForebayError
from forebay.generators.discovery.module_loading import import_roots, load_module, set_import_path, user_frames
from forebay.generators.process.agent_logs import RUN_DIR_VARIABLE
from forebay.generators.process.code_copy import packages_folder
from forebay.generators.process.spec import RunSpec, write_part
from forebay.telemetry.log import set_up_logging

STOPPED = "ended by SIGTERM: the run, or the server, was stopped\n"


def main(arguments: list[str]) -> None:
    """Run to the end; a failed or interrupted run ends at once, whatever threads are left."""
    spec_fd, report_fd, parent_pid = map(int, arguments)
    die_with_parent(parent_pid)
    spec = RunSpec.read(spec_fd)
    ending = _ReportAtExit(report_fd)
    os.set_inheritable(report_fd, False)  # what the user's code starts has no say in the report
    sigterm = _SigtermAsCtrlC()
    _flush_every_line()
    set_up_logging("info")
    try:
        _call_run_rollout(spec)
    except BaseException as error:  # noqa: BLE001 -- whatever the user's code raises ends the run, and is reported
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            # A stop is no failure: where it met the code tells nobody anything.
            is_stopped = sigterm.has_come and isinstance(error, KeyboardInterrupt)
            _fail(error, report_fd, said=STOPPED if is_stopped else None)
    ending.is_returned = True


class _ReportAtExit:
    """Reports the return of ``run_rollout`` when all it left behind has ended too.

    Registered before user code, so called after everything else: by then the threads and the multiprocessing children
    have been waited for. What goes wrong later, while the interpreter is taken down, is no failure of the run.
    """

    def __init__(self, report_fd: int) -> None:
        self.is_returned = False
        self._report_fd = report_fd
        self._pid = os.getpid()
        atexit.register(self)

    def __call__(self) -> None:
        if self.is_returned and os.getpid() == self._pid:
            write_part(self._report_fd, is_returned=True)


def _call_run_rollout(spec: RunSpec) -> None:
    module_path = Path(spec.module_path)
    original = Path(spec.original_folder)
    os.environ[RUN_DIR_VARIABLE] = str(module_path.parents[1])
    set_import_path(module_path.parent, packages_folder(module_path), original, *import_roots(original))
    result = load_module(module_path).run_rollout(spec.payload)
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


def _flush_every_line() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Half a surrogate pair in a print must not end the run.
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def _fail(error: BaseException, report_fd: int, *, said: str | None = None) -> NoReturn:
    """End the run with ``error``, of which the log says what is ``said``, else everything."""
    text = "".join(traceback.format_exception(type(error), error, user_frames(error.__traceback__, __file__)))
    last_line = [line for line in text.splitlines() if line.strip()][-1].strip()
    if isinstance(error, ForebayError) and error.hint:
        text += f"hint: {error.hint}\n"
    sys.stderr.write(text if said is None else said)
    write_part(report_fd, error=last_line, traceback=text)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
