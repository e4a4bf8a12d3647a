"""What each extra installs is enough for what is promised of it, and the rest ends with the line that installs it."""

import resource
import statistics
import subprocess
from pathlib import Path

import pytest

from tests.install.conftest import Environment, call
from tests.kit import ServerProcess

TRAINER = """
import sys
from forebay.client import *
from forebay.client import slime, tensors
url, run_id, *uids = sys.argv[1:]
with SampleWriter(url, run_id) as writer, BufferClient(url) as client:
    for uid in uids:
        writer.write({"uid": uid, "instance_id": "sum", "messages": [], "reward": float(uid), "tokens": [1, 2]})
    writer.flush()
    client.attach(run_id)
    batch = client.read(num_groups=1)
    print(*(row["uid"] for row in batch.rows))
    client.checkpoint(0)
    print(*(each.step for each in client.checkpoints()))
"""
NEEDS_SERVER = "pip install 'forebay[server]'"


def test_the_client_alone_writes_reads_and_checkpoints(
    environment: Environment, server: ServerProcess, tmp_path: Path
) -> None:
    python = environment("")
    run = server.start_run(group_size=2)
    assert call(python, "-P", "-c", TRAINER, server.url, run.run_id, "1", "0", cwd=tmp_path).split() == ["1", "0", "0"]
    installed = {path.name.partition("-")[0] for path in python.parents[1].glob("lib/*/site-packages/*.dist-info")}
    assert {"forebay", "httpx", "msgspec"} <= installed
    assert not installed & {"typer", "pydantic", "fastapi", "openai", "numpy"}


def test_skip_manager_needs_only_its_extra(environment: Environment, tmp_path: Path) -> None:
    call(environment("skip"), "-P", "-c", "import forebay.replay.skip", cwd=tmp_path)


IMPORTS = "import httpx, msgspec", "from forebay.client import BufferClient"


def seconds_of(python: Path, code: str) -> float:
    """Processor seconds, which a busy machine changes least."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, "-P", "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_importing_the_client_costs_little_more_than_its_dependencies(environment: Environment) -> None:
    python = environment("")
    took = [[seconds_of(python, names) for names in IMPORTS] for _ in range(7)]
    floor, ours = map(statistics.median, zip(*took, strict=True))
    assert ours <= 1.5 * floor


@pytest.mark.parametrize(
    "module", ["server.app", "generators.base", "hooks", "buffer", "gateway", "web", "workers.groups"]
)
def test_without_the_server_its_imports_end_with_the_line_that_installs_it(
    environment: Environment, module: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [environment(""), "-P", "-c", f"import forebay.{module}"], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == NEEDS_SERVER


@pytest.mark.parametrize(
    ("extras", "arguments"), [("", ["status"]), ("cli", ["serve"]), ("cli", ["generators", "list"])], ids=str
)
def test_a_command_without_its_extra_ends_with_that_line(
    environment: Environment, extras: str, arguments: list[str], tmp_path: Path
) -> None:
    command = environment(extras).parent / "forebay"
    ended = subprocess.run([command, *arguments], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (1, "", 1)
    assert ended.stderr.endswith(f" is not installed: {NEEDS_SERVER}\n")


def test_commands_that_call_a_server_need_only_the_extra_cli(
    environment: Environment, server: ServerProcess, tmp_path: Path
) -> None:
    run = server.start_run(name="calls-only")
    forebay = environment("cli").parent / "forebay"
    shown = [
        call(forebay, command, "--url", server.url, run.run_id, cwd=tmp_path) for command in ("status", "bias", "stop")
    ]
    assert "calls-only" in shown[0]
    assert shown[1] == "Nothing was dropped yet.\n"
    assert run.view()["state"] == "stopped"
