"""A run of ten thousand samples goes into a file, and is checked, in the memory of a few of them."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from forebay.replay import Recording
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, make_sample

pytestmark = pytest.mark.bench

GROUPS, GROUP_SIZE, BODY_BYTES = 1_250, 8, 20_000
ROOM_BYTES = 64 << 20
"""A third of the bodies: allocators, caches and columns of rows take their part."""
PEAK = """
import sys
from forebay.server.cli.command_line import run
try:
    run(sys.argv[1:])
finally:
    # Not ru_maxrss: that begins with what the process needed from which this one was forked.
    [peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(int(peak) << 10, file=sys.stderr)
"""


def fill(run: NativeRun) -> None:
    for group in range(GROUPS):
        # Text that compresses badly: the file is about as large as the bodies.
        run.write(
            *(
                make_sample(uid=f"{group}/{slot}", instance_id=group, text=os.urandom(BODY_BYTES // 2).hex())
                for slot in range(GROUP_SIZE)
            )
        )


def peak_of(*arguments: str) -> int:
    """Bytes that a command needed at most."""
    done = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1])


def memory_of(server: ServerProcess) -> int:
    return int(psutil.Process(server.pid).memory_info().rss)


def test_an_export_takes_the_memory_of_a_few_samples(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server()
    run = server.start_run(group_size=GROUP_SIZE)
    path = tmp_path / "a.fbr"
    idle = peak_of("status", "--url", server.url)
    fill(run)
    before = memory_of(server)
    taken = peak_of("recording", "export", run.run_id, str(path), "--url", server.url)
    grown = memory_of(server) - before
    checked = peak_of("recording", "verify", str(path))
    with Recording(path) as recording:
        num_bytes = recording.made.num_bytes
        assert recording.made.num_samples == GROUPS * GROUP_SIZE
    print(
        f"{num_bytes >> 20} MiB: export {taken - idle >> 20}, verify {checked - idle >> 20}, server {grown >> 20} MiB"
    )
    assert num_bytes > 2 * ROOM_BYTES
    assert max(taken - idle, checked - idle, grown) < ROOM_BYTES
    run.stop()
