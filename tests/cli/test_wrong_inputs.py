"""Wrong input ends in a line that says what to do, with exit code 2, before anything was done."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Forebay
from tests.kit import ServerProcess

START = ["start", "--task-type", "idle", "--group-size", "2"]
INFINITE = 'sampling_params={"temperature": Infinity}'


def test_an_empty_run_is_no_run(forebay: Forebay, server: ServerProcess) -> None:
    run = server.start_run()
    for command in ("stop", "status"):
        outcome = forebay(command, "", "--url", server.url)
        assert outcome.code == 2
        assert "RUN is empty" in outcome.err
    assert run.view()["state"] == "running"
    forebay("stop", run.run_id, "--url", server.url)


@pytest.mark.parametrize("flag", [("--agent", "some-uid"), ("--log", 5)])
def test_what_is_of_one_run_asks_for_it(forebay: Forebay, server: ServerProcess, flag: tuple[str, object]) -> None:
    outcome = forebay("status", *flag, "--url", server.url)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{flag[0]} needs one run" in outcome.err
    assert f"forebay status RUN {flag[0]}" in outcome.err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--temperature", "nan"], "'sampling_params' cannot be sent as JSON"),
        (["--set", INFINITE], "'sampling_params' cannot be sent as JSON"),
        (["--name", "\udcff"], "'name' cannot be sent as JSON"),
        (["--token", "\u00e9"], "the token has characters"),
        (["--token", "a\nb"], "the token has characters"),
        (["--group-size", "0"], "'--group-size'"),
    ],
)
def test_what_cannot_be_sent_is_told(forebay: Forebay, server: ServerProcess, given: list[str], told: str) -> None:
    outcome = forebay(*START, *given, "--url", server.url)
    assert (outcome.code, outcome.out) == (2, "")
    assert told in outcome.err


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("nan.json", '{"depth": NaN}', "'depth' cannot be sent as JSON"),
        ("date.toml", "day = 2020-01-01", "'day' cannot be sent as JSON"),
        ("params.json", '{"sampling_params": "hot"}', "sampling_params must be an object (got 'hot')"),
        ("deep.json", "[" * 100_000, "deep.json cannot be read"),
    ],
)
def test_a_file_that_cannot_be_sent_is_told(
    forebay: Forebay, server: ServerProcess, tmp_path: Path, name: str, text: str, told: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    outcome = forebay(*START, file, "--temperature", 1, "--url", server.url)
    assert outcome.code == 2
    assert told in outcome.err


def test_a_group_size_of_0_in_a_file_is_told_as_what_it_is(
    forebay: Forebay, server: ServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"task_type": "idle", "group_size": 0}))
    outcome = forebay("start", file, "--url", server.url)
    assert outcome.code == 1
    assert "is missing" not in outcome.err
    assert "group_size" in outcome.err


@pytest.mark.parametrize("command", ["serve", "demo"])
@pytest.mark.parametrize("below", ["", "inside"])
def test_a_data_directory_that_is_a_file_is_told(forebay: Forebay, tmp_path: Path, command: str, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    outcome = forebay(command, "--data-dir", file / below, *(["--port", "0"] if command == "serve" else []))
    assert outcome.code == 2
    assert f"{file / below} cannot be used" in outcome.err
    assert "hint: give --data-dir a folder" in outcome.err
    assert "space" not in outcome.err
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    ("port", "told"),
    [("70000", "port 70000 of 127.0.0.1 cannot be used"), ("-1", "port -1 of 127.0.0.1 cannot be used")],
)
def test_a_port_that_is_none_is_refused_by_the_engine(forebay: Forebay, port: str, told: str) -> None:
    outcome = forebay("engine", "tiny", "--port", port)
    assert outcome.code == 2
    assert told in outcome.err


def test_an_engine_names_the_port_that_is_taken(forebay: Forebay, server: ServerProcess) -> None:
    outcome = forebay("engine", "tiny", "--port", server.port)
    assert outcome.code == 2
    assert f"port {server.port} of 127.0.0.1 cannot be used: Address already in use" in outcome.err
    assert "hint: " in outcome.err
