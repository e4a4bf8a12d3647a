"""Commands in a sandbox: what they find, what they may use, and that nothing of them is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from forebay.core.errors import InvalidInput
from forebay.generators.sandbox import Finished, Limits, Sandbox, shown
from tests.kit import poll_until

TREE = """
setsid sh -c 'echo $$ > session; exec sleep 1000' &
(setsid sh -c 'sh -c "echo \\$\\$ > orphan; exec sleep 1000" &' &)
sh -c 'trap "" TERM; echo $$ > stubborn; while :; do sleep 1000; done' &
while [ ! -s session ] || [ ! -s orphan ] || [ ! -s stubborn ]; do sleep 0.01; done
cat session orphan stubborn > all.tmp; mv all.tmp all
"""
"""Leaves a session of its own, an orphan of another one, and a process that ignores SIGTERM; then writes their pids."""


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid)]


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


async def run(command: list[str] | str, **how: object) -> Finished:
    async with Sandbox() as sandbox:
        return await sandbox.run(command, **how)


async def test_a_command_is_heard_and_told() -> None:
    finished = await run("cat; echo oops >&2; exit 3", stdin=b"hello")
    assert (finished.stdout, finished.stderr, finished.exit_status) == ("hello", "oops\n", 3)
    assert finished.problem == "ended with status 3: oops"
    assert not finished.is_timed_out


async def test_a_command_need_not_read_what_it_is_told() -> None:
    assert (await run(["true"], stdin=b"x" * 1_000_000)).problem == ""


async def test_the_environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_TOKEN", "secret")
    async with Sandbox({"OURS": "1"}) as sandbox:
        finished = await sandbox.run(python("import json, os; print(json.dumps(dict(os.environ)))"), env={"MORE": "2"})
        found = json.loads(finished.stdout)
        assert found["HOME"] == found["TMPDIR"] == str(sandbox.folder)
    assert (found["OURS"], found["MORE"], found["PATH"]) == ("1", "2", os.environ["PATH"])
    assert "CLUSTER_TOKEN" not in found


async def test_commands_share_a_folder_which_is_removed() -> None:
    async with Sandbox() as sandbox:
        await sandbox.run("mkdir -p a/b; echo 1 > a/b/file; chmod -R a-w a")
        assert (await sandbox.run("cat a/b/file")).stdout == "1\n"
    assert not sandbox.folder.exists()


async def test_a_folder_that_is_gone_changes_nothing_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    async with Sandbox() as sandbox:
        sandbox.folder.rmdir()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


async def test_nothing_outlives_a_command_that_ended() -> None:
    async with Sandbox() as sandbox:
        finished = await sandbox.run(f"{TREE} cat all")
    pids = [int(pid) for pid in finished.stdout.split()]
    assert len(pids) == 3
    assert alive(pids) == []


async def test_nothing_outlives_a_command_that_is_cancelled() -> None:
    async with Sandbox() as sandbox:
        running = asyncio.create_task(sandbox.run(f"{TREE} sleep 1000"))
        told = await asyncio.to_thread(poll_until, lambda: (sandbox.folder / "all").exists() and sandbox.folder / "all")
        pids = [int(pid) for pid in told.read_text().split()]
        assert alive(pids) == pids
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert alive(pids) == []


async def test_nothing_outlives_a_command_that_took_too_long() -> None:
    restarting = "while :; do setsid sleep 1000 & echo $!; sleep 0.01; done"
    finished = await run(restarting, limits=Limits(wall_s=0.3))
    assert finished.is_timed_out
    assert finished.problem.startswith(f"was killed after {finished.wall_s:.1f} s")
    assert finished.wall_s >= 0.3
    assert alive([int(pid) for pid in finished.stdout.split()]) == []


def test_nothing_outlives_the_process_that_ran_it(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = (
        "import asyncio, sys; from forebay.generators.sandbox import Sandbox\n"
        "async def main():\n  async with Sandbox() as sandbox:\n"
        f"    await sandbox.run({TREE + f'pwd >> all; cp all {told}.tmp; mv {told}.tmp {told}; sleep 1000'!r})\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        *pids, folder = poll_until(lambda: told.exists() and told.read_text()).split()
        os.killpg(process.pid, signal.SIGKILL)
    assert len(pids) == 3
    poll_until(lambda: not alive([int(pid) for pid in pids]))
    poll_until(lambda: not Path(folder).exists())


async def test_memory_is_limited() -> None:
    finished = await run(python("bytearray(1 << 30)"), limits=Limits(memory_bytes=256 << 20))
    assert "MemoryError" in finished.problem


async def test_processor_time_is_limited() -> None:
    finished = await run(python("while True: pass"), limits=Limits(wall_s=60, cpu_s=1))
    assert finished.exit_status == -signal.SIGKILL


async def test_files_are_limited() -> None:
    finished = await run("head -c 100000 /dev/zero > big", limits=Limits(file_bytes=4_096))
    assert finished.exit_status != 0


async def test_of_too_much_output_both_ends_are_kept() -> None:
    finished = await run(
        python("print('a' * 100 + 'b' * 1_000_000 + 'c' * 100, end='')"), limits=Limits(output_bytes=40)
    )
    assert finished.is_output_cut
    assert finished.stdout == f"{'a' * 20}\n[… 1000160 bytes …]\n{'c' * 20}"


async def test_output_within_the_limit_is_whole() -> None:
    finished = await run(python("print('a' * 40, end='')"), limits=Limits(output_bytes=40))
    assert (finished.stdout, finished.is_output_cut) == ("a" * 40, False)


@pytest.mark.parametrize("command", [["/no/such/program"], [], [1], ["a\0b"]])
async def test_a_command_that_cannot_be_started_is_told(command) -> None:
    with pytest.raises(InvalidInput) as caught:
        await run(command)
    assert caught.value.field == "command"


@pytest.mark.parametrize("wrong", [{"wall_s": 0}, {"wall_s": float("inf")}, {"cpu_s": -1}, {"output_bytes": 0}])
def test_limits_are_checked(wrong) -> None:
    with pytest.raises(InvalidInput, match="must be more than 0"):
        Limits(**wrong)


def test_commands_are_shown_as_they_are_typed() -> None:
    assert shown(["echo", "a b"]) == "echo 'a b'"
    assert shown("echo a b") == "echo a b"
