"""What a run leaves on the disk is bounded, however much its code prints and however often it is started."""

from pathlib import Path

from tests.conftest import MakeServer
from tests.kit import IDLE, NativeRun, ServerProcess, make_group, poll_until, write_generator

LIMIT_BYTES = 100_000
PRINTS = (
    IDLE.replace('"idle"', '"prints"')
    + """
import subprocess
def is_valid_group(group, min_valid_group_size, task_type):
    for number in range(200_000):
        print("line", number)
    subprocess.run(["echo", "from a program"])
    return True, True
"""
)


def test_what_hooks_print_is_bounded(make_server: MakeServer, tmp_path: Path) -> None:
    write_generator(tmp_path / "tasks", PRINTS, "prints_generator.py")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60, max_log_bytes=LIMIT_BYTES)
    run = server.start_run("prints", group_size=2)
    deliver(run, "one")
    folder = next(server.data_dir.rglob("hooks.log")).parent

    def printed() -> str:
        return text_of(folder / "hooks.log.1") + text_of(folder / "hooks.log")

    poll_until(lambda: "from a program" in printed())
    assert "line 199999\n" in printed()
    files = list(folder.glob("hooks.log*"))
    assert sum(file.stat().st_size for file in files) <= LIMIT_BYTES
    assert sum(file.stat().st_size for file in files) > LIMIT_BYTES // 4, "the newest is kept"


def test_a_run_that_prints_is_bounded_by_the_setting(make_server: MakeServer, tmp_path: Path) -> None:
    source = IDLE.replace("threading.Event", "[print('line', n) for n in range(200_000)]; threading.Event")
    write_generator(tmp_path / "tasks", source.replace('"idle"', '"talks"'), "talks_generator.py")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60, max_log_bytes=LIMIT_BYTES)
    server.start_run("talks", group_size=2)
    log = poll_until(lambda: next(server.data_dir.rglob("run.log"), None))
    poll_until(lambda: "line 199999\n" in text_of(log))
    assert sum(file.stat().st_size for file in log.parent.glob("run.log*")) <= LIMIT_BYTES


def text_of(log: Path) -> str:
    """What is in it; it is put aside now and then."""
    try:
        return log.read_text()
    except FileNotFoundError:
        return ""


def deliver(run: NativeRun, name: str, text: str = "", num_groups: int = 1) -> None:
    """Write groups, read and acknowledge them."""
    for number in range(num_groups):
        run.write(*make_group(f"{name}-{number}", [0, 1], text=text))
    run.take(num_groups=num_groups, wait_s=20)


def copies(server: ServerProcess, run: NativeRun) -> list[Path]:
    return list((server.data_dir / "runs" / run.run_id).glob("start-*/code"))


def test_a_runs_copy_of_its_code_goes_with_its_last_body(make_server: MakeServer) -> None:
    server = make_server(segment_bytes=1 << 16, max_journal_bytes=1 << 16)
    kept, ended, bare = (server.start_run(group_size=2) for _ in range(3))
    deliver(ended, "ended")
    poll_until(lambda: copies(server, bare))
    for run in (ended, bare):
        run.stop()
    # Of this one nothing was ever stored: it shows that somebody has looked.
    poll_until(lambda: not copies(server, bare))
    assert copies(server, ended), "its bodies are there, and may be asked for"
    deliver(kept, "fills", text="x" * 4_000, num_groups=40)
    server.client.post("/v1/gc").raise_for_status()
    poll_until(lambda: not copies(server, ended))
    assert copies(server, kept), "it has not ended"
    assert ended.view()["state"] == "stopped"
    assert server.client.get(f"{ended.path}/log").is_success
    server.stop()
    server.restart()
    assert ended.view()["state"] == "stopped"
    deliver(kept, "after")
