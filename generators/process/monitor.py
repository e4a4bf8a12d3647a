"""Monitor between the server and a run process, which outlives both briefly.

``python -m forebay.generators.process.monitor MODULE LOG_PATH LOG_LIMIT_BYTES``, started as a child, starts ``MODULE``,
the main of the run process, in its own session. The monitor passes it the link to the server, writes its output to the
log, and forwards SIGTERM to its process group. When the run process ends, the monitor kills the rest of the group and
exits with the same status; the server then kills the rest of the session. When the server hangs up or is gone, the
monitor kills the session. It runs no user code, so even a stuck run and its forks die with the server.
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
"""How long the log waits for output held back by a process that left the group."""


def main(arguments: list[str]) -> None:
    """Start the run process, watch it, and exit with its status."""
    module, log_path, log_limit, server = arguments[:4]
    log = OutputFile(Path(log_path), int(log_limit))
    reader, writer = os.pipe()
    # Started from the main thread, because the kernel kills the run process when the starting thread ends.
    runtime = _start_runtime(module, writer, int(server))
    os.close(writer)
    signal.signal(signal.SIGTERM, lambda *_: signal_group(runtime.pid, signal.SIGTERM))
    threading.Thread(target=_kill_when_hung_up, args=(int(server), runtime.pid), daemon=True).start()
    pump = threading.Thread(target=_pump, args=(reader, log), daemon=True)
    pump.start()
    exit_code = runtime.wait()
    # Kills processes that it forked and left behind.
    signal_group(runtime.pid, signal.SIGKILL)
    pump.join(_DRAIN_S)
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if exit_code != -signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.raise_signal(-exit_code)
    os._exit(exit_code)  # one thread still waits for the server


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
    hang_up.register(server, select.POLLRDHUP)  # nothing is read: the messages are for the run process
    hang_up.poll()
    end_session(pid)


def _pump(reader: int, log: OutputFile) -> None:
    while chunk := os.read(reader, 65536):
        log.write(chunk)


if __name__ == "__main__":
    main(sys.argv[1:])
