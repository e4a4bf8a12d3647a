"""The process between a run process and a child with another Python: starts it and leaves none of its processes behind.

``python -m forebay.generators.environments.child_tree CLOSING_S PYTHON ARGUMENTS...``, started as a child, starts
``PYTHON`` with ``ARGUMENTS``, the link to the parent and its own pid. It exits with the child's status. When the parent
hangs up or is gone, the child has ``CLOSING_S`` seconds to end.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

from forebay.core.child_process import adopt_orphans
from forebay.generators.sandbox.supervisor import kill_descendants


def main(arguments: list[str]) -> int:
    """Run the child until it ends, or the parent hangs up. Returns its exit status."""
    closing_s, command, link = float(arguments[0]), arguments[1:-2], int(arguments[-2])
    # Processes of the environment may have sessions of their own: they are known by having this one as their ancestor.
    adopt_orphans()
    # A stop of the run reaches the parent, which then hangs up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([*command, str(link), str(os.getpid())], stdin=subprocess.DEVNULL, pass_fds=[link])  # noqa: S603 -- the interpreter that the setting names
    try:
        _wait(child, link, closing_s)
    finally:
        status = child.poll()
        kill_descendants()
    return 128 - status if status is not None and status < 0 else status or 0


def _wait(child: "subprocess.Popen[bytes]", link: int, closing_s: float) -> None:
    ending, hang_up = os.pidfd_open(child.pid), select.poll()
    hang_up.register(ending, select.POLLIN)
    hang_up.register(link, select.POLLRDHUP)  # nothing is read: the messages are for the child
    hang_up.poll()
    with suppress(subprocess.TimeoutExpired):
        child.wait(closing_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
