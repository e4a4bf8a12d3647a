"""What a run process and its workers print, as it reaches the log that they share."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

PROGRAM = """\
import sys
from forebay.generators.process.main import set_up_output
set_up_output()
print("begun", 1)
print("half a pair: \\ud83d")
print("an error", file=sys.stderr)
"""


@pytest.fixture
def written() -> Iterator[tuple[int, int]]:
    """A pipe whose reader gets each write by itself."""
    ends = os.pipe2(os.O_DIRECT)
    yield ends
    os.close(ends[0])


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_one_write_so_that_no_other_worker_can_break_it(written, unbuffered: str) -> None:
    reader, writer = written
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run(command, stdout=writer, stderr=writer, env=environment, check=True, timeout=60)
    os.close(writer)
    writes = list(iter(lambda: os.read(reader, 1 << 16), b""))
    assert writes == [b"begun 1\n", b"half a pair: \\ud83d\n", b"an error\n"]
