"""A disk that is full: what is stored is read, delivered and acknowledged, also after a restart; new is a 507."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, assert_error, make_group, make_sample, poll_until

DISK_BYTES = 32 << 20
NUM_GROUPS = 300


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs privileges; tests/buffer/store/test_reserve.py fakes a full disk")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill_up(disk: Path) -> Path:
    """Take every byte that is left."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    assert shutil.disk_usage(disk).free == 0
    return ballast


def refused(run: NativeRun) -> None:
    response = run.client.post(f"{run.path}/samples", json=[make_sample(text="y" * 200_000)])
    assert_error(response, 507, "storage_failed")


def take(run: NativeRun, num_batches: int) -> set[str]:
    """Read and acknowledge; the groups that came."""
    found: set[str] = set()
    for _ in range(num_batches):
        batch = run.take(num_groups=5)
        assert len(batch["data"]) == 10
        found |= {str(row["instance_id"]) for row in batch["data"]}
    return found


def acked(run: NativeRun) -> set[str]:
    return {str(group["instance_id"]) for group in run.groups(state="acked")}


def test_a_full_disk_keeps_nobody_from_reading_and_acknowledging(make_server: MakeServer, small_disk: Path) -> None:
    data_dir = small_disk / "data"
    server: ServerProcess = make_server(data_dir=data_dir, segment_bytes=1 << 16, reserve_bytes=8 << 20)
    run = server.start_run(group_size=2)
    for number in range(NUM_GROUPS):
        run.write(*make_group(f"task-{number}", [1.0, 0.0], text="x" * 1_000))
    assert (data_dir / "reserve").stat().st_size == 8 << 20
    leased = run.read(num_groups=5)
    server.kill9()
    ballast = fill_up(small_disk)

    server.restart()
    assert run.view()["state"] == "running"
    run.ack(leased)
    refused(run)
    # Told from before, or from the moment at which the first was refused, on.
    poll_until(lambda: server.client.get("/readyz").status_code == 503)
    refused(run)
    assert_error(server.client.post("/v1/runs", json={"task_type": "idle", "group_size": 2}), 507, "storage_failed")
    first = acked(run) | take(run, 20)
    num_segments = len(list((data_dir / "segments").glob("*.log")))
    refused(run)
    server.kill9()

    # Once more, with most of the reserve used, and segments that end on the full disk.
    fill_up(small_disk)
    server.restart()
    assert acked(run) == first
    second = take(run, 20)
    assert acked(run) == first | second
    assert not first & second
    refused(run)
    assert "stored samples are read and acknowledged using the reserve" in server.log()
    assert len(list((data_dir / "segments").glob("*.log"))) > num_segments

    os.truncate(ballast, 0)
    sample = make_sample(uid="after")
    poll_until(lambda: run.client.post(f"{run.path}/samples", json=[sample]).status_code == 200)
    poll_until(lambda: (data_dir / "reserve").stat().st_size == 8 << 20)
    poll_until(lambda: server.client.get("/readyz").status_code == 200)
    server.stop()
    server.restart()
    assert acked(run) == first | second
    assert run.write(sample)[0]["duplicate"]
    left = take(run, (NUM_GROUPS - len(first | second)) // 5)
    assert len(left | first | second) == NUM_GROUPS
