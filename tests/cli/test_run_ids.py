"""Ids are shown whole, and the beginning of one is enough to name a run."""

import json
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from fcntl import ioctl

import pytest

from forebay.core.errors import InvalidInput
from forebay.server.cli.client import pick_run
from tests.cli.conftest import Forebay
from tests.kit import Json, NativeRun, ServerProcess, make_group

NARROW = 30


def in_a_terminal(*arguments: str, columns: int = NARROW) -> str:
    """What a command writes in a terminal of so many columns."""
    terminal, inner = os.openpty()
    ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, "-m", "forebay.server.cli", *arguments]
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environ):
        os.close(inner)
        written = b"".join(read_all(terminal))
    os.close(terminal)
    return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", written).decode()


def read_all(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # Linux's way of saying that nobody has the other end any more
            return
        yield part


@pytest.fixture
def run(server: ServerProcess) -> Iterator[NativeRun]:
    run = server.start_run(name="a-name-that-is-longer-than-any-column-of-a-narrow-terminal")
    yield run
    run.stop()


def test_a_list_in_a_narrow_terminal_has_every_id_and_name_in_one_piece(server: ServerProcess, run: NativeRun) -> None:
    told = in_a_terminal("status", "--url", server.url)
    assert run.run_id in told
    assert run.view()["name"] in told
    assert "…" not in told


def test_one_run_in_a_narrow_terminal_has_its_id_in_one_piece(server: ServerProcess, run: NativeRun) -> None:
    assert run.run_id in in_a_terminal("status", run.run_id, "--url", server.url)


def test_what_follow_draws_in_a_narrow_terminal_has_the_id_in_one_piece(server: ServerProcess) -> None:
    task_type = "with-a-long-task-type"
    source = f'TASK_TYPE = "{task_type}"\ndef run_rollout(data): ...\n'
    (server.generators / "long_type_generator.py").write_text(source)
    given = ["--task-type", task_type, "--group-size", "2", "--set", "group_timeout_seconds=0.1", "--follow"]
    told = in_a_terminal("start", *given, "--url", server.url, columns=36)
    run_id = told.split()[0]
    assert re.fullmatch(r"run-[0-9a-f]{12}", run_id)
    assert "│" in told, "the progress was not drawn"
    panel = told[told.index("╭") : told.rindex("╯")]
    assert run_id in panel


def test_the_beginning_of_an_id_or_of_a_name_is_enough(forebay: Forebay, server: ServerProcess) -> None:
    run = server.start_run(name="beginnings-of-names")
    target = ["--url", server.url]
    shown = json.loads(forebay("status", run.run_id[:-3], "--json", *target).out)
    assert shown["run_id"] == run.run_id
    assert json.loads(forebay("status", "beginnings", "--json", *target).out)["run_id"] == run.run_id
    stopped = forebay("stop", run.run_id[:-3], *target)
    assert stopped.out.startswith(f"{run.run_id} is stopped")


def test_a_start_attaches_to_the_run_whose_id_begins_so(forebay: Forebay, server: ServerProcess) -> None:
    run = server.start_run(name="attached-to")
    run.write(*make_group("a", [0.0, 1.0, 0.0, 1.0]))
    given = ["--task-type", "idle", "--group-size", "4", "--set", f"run_id={run.run_id[:-3]}"]
    outcome = forebay("start", *given, "--url", server.url)
    assert (outcome.code, outcome.out.strip()) == (0, run.run_id)
    run.stop()


def test_a_beginning_of_several_is_refused_with_their_list(forebay: Forebay, server: ServerProcess) -> None:
    runs = [server.start_run(name=f"twin-{n}") for n in (1, 2)]
    outcome = forebay("stop", "twin", "--url", server.url)
    assert outcome.code == 2
    assert "'twin' could be any of 2 runs:" in outcome.err
    assert all(run.run_id in outcome.err for run in runs)
    assert [run.view()["state"] for run in runs] == ["running", "running"]
    for run in runs:
        run.stop()


def test_a_whole_id_or_name_comes_before_beginnings_and_the_newest_of_a_name_stands_for_it() -> None:
    def view(run_id: str, name: str) -> Json:
        return {"run_id": run_id, "name": name, "task_type": "math"}

    views = [view("run-a", "exp"), view("run-ab", "exp"), view("run-b", "exp-2"), view("run-c", "run-a")]
    chosen = {given: pick_run(views, given)["run_id"] for given in ("run-a", "exp", "exp-", "run-b")}
    assert chosen == {"run-a": "run-a", "exp": "run-ab", "exp-": "run-b", "run-b": "run-b"}
    many = [view(f"run-{n:02}", "") for n in range(50)]
    with pytest.raises(InvalidInput, match=r"50 runs:(.|\n)*run-49(.|\n)*and 30 older ones"):
        pick_run(many, "run-")
