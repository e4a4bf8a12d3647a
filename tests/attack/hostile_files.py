"""Files made to do harm, and commands that look into them within limits of time and memory."""

import subprocess
import sys

TIME_LIMIT_S = 60
MEMORY_LIMIT_BYTES = 3 << 30
COMMAND = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), -1))
from forebay.server.cli.command_line import run
run(sys.argv[2:])
"""


def forebay_in_time(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """How ``forebay ARGUMENTS`` ended: raises ``TimeoutExpired`` if it does not; a traceback is never shown."""
    given = map(str, (MEMORY_LIMIT_BYTES, *arguments))
    command = [sys.executable, "-P", "-c", COMMAND, *given]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended
