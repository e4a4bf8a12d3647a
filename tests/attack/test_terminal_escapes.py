"""Nothing that others wrote rules the terminal of whoever looks at it, and no name makes a line of a log."""

import json
import logging
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console

from forebay.server.cli.command_line import app
from forebay.server.cli.output import VisibleConsole
from forebay.server.cli.progress import LiveDisplay, RunProgress
from forebay.telemetry.log import EntryFormatter
from forebay.telemetry.visible_text import HIDDEN, visible, visible_json
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import ServerProcess, make_sample, poll_until, write_generator

__all__ = ["forebay"]

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b1m\x7f\x08\u202eevil\u2066\u200f\u061c\u2028[/red][bold]"
"""An escape sequence of each kind, reversed text, and markup."""
CODE = r"""
import sys, threading
EVIL = %r
TASK_TYPE = "evil" + EVIL
def run_rollout(data):
    print("log of " + EVIL, "2026-01-01 00:00:00,000 INFO forged", sep="\n", flush=True)
    sys.stdout.buffer.write(b"\xff\xfe\x1b[0m\n")
    sys.stdout.flush()
    if data.get("fails"):
        raise RuntimeError("failed with " + EVIL)
    threading.Event().wait()
"""
BROKEN = "raise RuntimeError('broken ' + %r)\n"
LISTED = {
    "status": ["{run}", "--log", "50"],
    "stop": ["{run}"],
    "start": ["--task-type", "{task_type}", "--input-file", "{folder}/none{name}", "--group-size", "1"],
    "gc": [],
    "profile": ["{run}", "--compare", "{folder}/none{name}"],
    "compare": ["{folder}/none{name}", "--code", "{folder}/broken_generator.py"],
    "simulate": ["{folder}/none{name}", "--policy", "{name}"],
    "trace export": ["{run}", "--to", "published", "--output", "{folder}/exported{name}"],
    "show": ["{run}", "--grep", "."],
    "export": ["{run}", "{folder}/exported{name}.jsonl", "--to", "jsonl"],
    "bias": ["{run}"],
    "mismatch": ["{run}"],
    "recording export": ["{run}", "{folder}/exported{name}.fbr"],
    "recording show": ["{folder}/none{name}.fbr"],
    "recording verify": ["{folder}/none{name}.fbr"],
    "recording diff": ["{folder}/none{name}.fbr", "{run}"],
    "generators list": ["--generators", "{folder}"],
    "generators check": ["{folder}/broken_generator.py"],
    "generators new": ["{task_type}", "--dir", "{folder}/new"],
    "serve": ["--config", "{folder}/none{name}.toml"],
    "engine tiny": ["--model-path", "{folder}/none{name}"],
    "engine record": ["{folder}/none{name}/calls.fbr", "--upstream", "http://127.0.0.1:9"],
    "engine replay": ["{folder}/none{name}.fbr"],
    "demo": ["--dir", "/dev/null/{name}"],
}
"""What each command is given."""


def commands(group: typer.Typer = app, before: str = "") -> Iterator[str]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield before + (command.name or command.callback.__name__.replace("_", "-"))
    for sub in group.registered_groups:
        assert sub.typer_instance is not None
        yield from commands(sub.typer_instance, f"{before}{sub.name} ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_generator(folder, CODE % EVIL, "evil_generator.py")
    write_generator(folder, BROKEN % EVIL, "broken_generator.py")
    return folder


@pytest.fixture(scope="module")
def evil_server(module_servers: MakeServer, folder: Path) -> ServerProcess:
    return module_servers(generators=folder, max_restarts=0)


def assert_harmless(*written: str) -> None:
    found = [(each, HIDDEN.search(each)) for each in written if HIDDEN.search(each)]
    assert not found


def test_every_command_is_attacked() -> None:
    assert sorted(commands()) == sorted(LISTED)


@pytest.mark.parametrize("name", LISTED)
def test_a_command_shows_what_others_wrote_and_does_nothing_of_it(
    evil_server: ServerProcess, folder: Path, forebay: Forebay, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = evil_server.start_run("evil" + EVIL, fails=name == "status")
    run.write(make_sample(instance_id=f"i{EVIL}", reward=None, status="failed", error=f"e{EVIL}"))
    poll_until(lambda: "log of" in str(run.client.get(f"{run.path}/log").json()["lines"]))
    if name == "status":
        run.wait_for_state("failed")
    given = {"run": run.run_id, "task_type": "evil" + EVIL, "name": EVIL.replace("\\", ""), "folder": str(folder)}
    arguments = [re.sub(r"{(\w+)}", lambda found: given[found.group(1)], part) for part in LISTED[name]]
    monkeypatch.setenv("FOREBAY_URL", evil_server.url)
    outcome = forebay(*name.split(), *arguments)
    assert_harmless(outcome.out, outcome.err)
    if name == "status":
        assert r"\x1b[31mred\x9b1m\x7f\x08\u202eevil\u2066\u200f\u061c\u2028[/red]" in outcome.out
        listed, document = forebay("status"), forebay("status", run.run_id, "--log", 50, "--json")
        assert_harmless(listed.out, listed.err, document.out)
        assert json.loads(document.out)["task_type"] == f"evil{EVIL}"
    run.stop()


def test_a_run_that_is_followed_shows_them_too(
    evil_server: ServerProcess, forebay: Forebay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_URL", evil_server.url)
    outcome = forebay("start", "--task-type", "evil" + EVIL, "--set", "fails=true", "--group-size", 1, "--follow")
    assert outcome.code == 1
    assert_harmless(outcome.out, outcome.err)


def test_a_live_panel_has_no_escapes_but_its_own(evil_server: ServerProcess) -> None:
    run = evil_server.start_run("evil" + EVIL)
    shown, plain = StringIO(), StringIO()
    for console, view in (
        (VisibleConsole(file=shown, force_terminal=True, width=200), run.view()),
        (Console(file=plain, force_terminal=True, width=200), {**run.view(), "task_type": "evil"}),
    ):
        with LiveDisplay(console) as display:
            display.show(RunProgress(view, 0.0))
    sequences = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
    assert set(sequences.findall(shown.getvalue())) <= set(sequences.findall(plain.getvalue()))
    assert_harmless(sequences.sub("", shown.getvalue()).replace("\r", ""))
    assert "[/red]" in shown.getvalue()
    run.stop()


def test_the_servers_log_keeps_its_lines(evil_server: ServerProcess) -> None:
    forged = "x\n2026-01-01 00:00:00,000 INFO forebay: all is well\x1b[2J"
    run = evil_server.start_run("evil" + EVIL, fails=True, note=forged)
    run.wait_for_state("failed")
    evil_server.client.post("/v1/runs", json={"task_type": forged, "group_size": 1})
    log = evil_server.log()
    assert_harmless(log)
    assert not [line for line in log.splitlines() if line.startswith("2026-01-01")]


def test_an_entry_of_a_log_is_one_entry() -> None:
    record = logging.makeLogRecord({"name": "n", "msg": "a\n2026 INFO forged\x1b[2J\r", "levelname": "INFO"})
    assert EntryFormatter("%(levelname)s %(message)s").format(record) == "INFO a\n    2026 INFO forged\\x1b[2J\\r"


def test_what_is_plain_stays_as_it_is() -> None:
    plain = "tabs\tand\nlines, naïve 日本語 👩\u200d💻 👍🏽, a\u200cb"
    assert visible(plain) == plain
    assert json.loads(visible_json({EVIL: [EVIL, "\ud800"]})) == {EVIL: [EVIL, "\ud800"]}
