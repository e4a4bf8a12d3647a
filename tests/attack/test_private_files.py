"""What lies in the data directory is its owner's alone, whatever the umask and whoever made it."""

import os
import stat
from pathlib import Path

from tests.conftest import MakeServer
from tests.kit import ServerProcess, make_sample, poll_until, write_generator

PRINTS_AND_WRITES = """
from pathlib import Path
TASK_TYPE = "prints"
def run_rollout(data):
    print("hello")
    Path("result.txt").write_text("the user's own")
def filter_item(item, task_type):
    print("asked")
    return True
"""


def open_to_others(path: Path) -> list[str]:
    found = [path, *path.rglob("*")]
    return [f"{each} {mode:o}" for each in found if (mode := stat.S_IMODE(each.lstat().st_mode)) & 0o077]


def start_with_a_run(make_server: MakeServer, **options: object) -> ServerProcess:
    """A server under a umask that lets others read, with a run that prints, a hook that does, and samples."""
    before = os.umask(0o022)
    try:
        server = make_server(**options)
        write_generator(server.generators, PRINTS_AND_WRITES, "prints_generator.py")
        script = server.generators / "helper.sh"
        script.write_text("#!/bin/sh\n")
        script.chmod(0o755)
        run = server.start_run("prints", group_size=1)
        run.write(make_sample())
        poll_until((server.directory / "result.txt").exists)
        run.read(num_groups=1)
        poll_until(lambda: list(server.data_dir.glob("runs/*/*/run.log")))
    finally:
        os.umask(before)
    return server


def test_everything_that_a_server_makes_is_its_owners_alone(make_server: MakeServer) -> None:
    server = start_with_a_run(make_server)
    files = {path.name for path in server.data_dir.rglob("*")}
    assert {"index.sqlite", "index.sqlite-wal", "00000001.log", "run.log", "prints_generator.py", "lock"} <= files
    assert open_to_others(server.data_dir) == []
    # What users run stays executable, and what they write elsewhere has the rights that they meant.
    [helper] = server.data_dir.rglob("helper.sh")
    assert os.access(helper, os.X_OK)
    assert stat.S_IMODE((server.directory / "result.txt").stat().st_mode) == 0o644


def test_a_directory_that_others_could_read_is_closed_at_the_next_start_and_the_log_says_so(
    make_server: MakeServer, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(0o755)
    foreign = shared / "notes.txt"
    foreign.write_text("not the server's")
    server = start_with_a_run(make_server, data_dir=shared)
    server.stop()
    for path in (shared, *shared.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    foreign.chmod(0o666)
    server.restart()
    assert [each.split()[0] for each in open_to_others(shared)] == [str(foreign)]
    assert server.log().count("other users could read") == 2
    server.stop()
    server.restart()
    assert server.log().count("other users could read") == 2
