"""Stands between the server and a run process, and outlives both by a moment.

``python -m forebay.generators.process.monitor MODULE LOG_PATH LOG_LIMIT_BYTES``, started as a child: starts ``MODULE``,
the main of the run process, in a session of its own, hands it the link to the server, writes what it prints to the log,
and passes SIGTERM on to its process group. When it has ended, the monitor kills what is left of the group and ends as
it did; the server then kills what is left of the session. When the server hangs up, or is gone, the monitor kills the
session. It runs none of the user's code, so a run that is stuck, and what it forked, die with the server.
"""

import os
import resource
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

from forebay.core.child_process import end_session, python_argv, signal_group
from forebay.telemetry.output_file import OutputFile

_DRAIN_S = 2.0
"""How long the log waits for output that a process which left the group still holds back."""


def main(arguments: list[str]) -> None:
    """Start, watch, and end as the runtime did."""
    module, log_path, log_limit, server = arguments[:4]
    log = OutputFile(Path(log_path), int(log_limit))
    reader, writer = os.pipe()
    # From the main thread: with the thread that started it, the kernel would kill the runtime.
    runtime = _start_runtime(module, writer, int(server))
    os.close(writer)
    signal.signal(signal.SIGTERM, lambda *_: signal_group(runtime.pid, signal.SIGTERM))
    threading.Thread(target=_kill_when_hung_up, args=(int(server), runtime.pid), daemon=True).start()
    pump = threading.Thread(target=_pump, args=(reader, log), daemon=True)
    pump.start()
    exit_code = runtime.wait()
    # What it forked and left behind goes with it.
    signal_group(runtime.pid, signal.SIGKILL)
    pump.join(_DRAIN_S)
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if exit_code != -signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.raise_signal(-exit_code)
    os._exit(exit_code)  # one thread waits for the server for ever


def _start_runtime(module: str, output: int, server: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 -- our own interpreter and module
        python_argv(module, str(server), str(os.getpid())),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[server],
        start_new_session=True,
    )


def _kill_when_hung_up(server: int, pid: int) -> None:
    hang_up = select.poll()
    hang_up.register(server, select.POLLRDHUP)  # nothing is read: the messages are for the runtime
    hang_up.poll()
    end_session(pid)


def _pump(reader: int, log: OutputFile) -> None:
    while chunk := os.read(reader, 65536):
        log.write(chunk)


if __name__ == "__main__":
    main(sys.argv[1:])
