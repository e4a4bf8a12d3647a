"""Stands between the server and a run process, and outlives both by a moment.

``python -m forebay.generators.process.monitor MODULE LOG_PATH LOG_LIMIT_BYTES SPEC_FD REPORT_FD``: starts ``MODULE``,
the main of the run process, in a session of its own, writes what it prints to the log, and passes SIGTERM on to its
process group. When it has ended, it kills what is left of the group, and the server then what is left of the session.
When the pipe on standard input closes (the server is gone, or its patience is over), it kills the session. It runs none
of the user's code, so a run that is stuck, and what it forked, die with the server.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from forebay.core.child_process import end_session, python_argv, signal_group, write_part
from forebay.telemetry.output_file import OutputFile

_DRAIN_S = 2.0
"""How long the log waits for output that a process which left the group still holds back."""


def main(arguments: list[str]) -> None:
    """Start, watch, and report the exit code of the runtime."""
    module, log_path = arguments[:2]
    log = OutputFile(Path(log_path), int(arguments[2]))
    spec_fd, report_fd = int(arguments[3]), int(arguments[4])
    reader, writer = os.pipe()
    # From the main thread: with the thread that started it, the kernel would kill the runtime.
    runtime = _start_runtime(module, writer, spec_fd, report_fd)
    os.close(writer)
    signal.signal(signal.SIGTERM, lambda *_: signal_group(runtime.pid, signal.SIGTERM))
    threading.Thread(target=_kill_when_closed, args=(0, runtime.pid), daemon=True).start()
    pump = threading.Thread(target=_pump, args=(reader, log), daemon=True)
    pump.start()
    exit_code = runtime.wait()
    # What it forked and left behind goes with it.
    signal_group(runtime.pid, signal.SIGKILL)
    pump.join(_DRAIN_S)
    write_part(report_fd, exit_code=exit_code)
    os._exit(0)  # one thread waits on standard input for ever


def _start_runtime(module: str, output: int, spec_fd: int, report_fd: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 -- our own interpreter and module
        python_argv(module, str(spec_fd), str(report_fd), str(os.getpid())),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[spec_fd, report_fd],
        start_new_session=True,
    )


def _kill_when_closed(lifeline: int, pid: int) -> None:
    while os.read(lifeline, 1024):
        pass
    end_session(pid)


def _pump(reader: int, log: OutputFile) -> None:
    while chunk := os.read(reader, 65536):
        log.write(chunk)


if __name__ == "__main__":
    main(sys.argv[1:])
