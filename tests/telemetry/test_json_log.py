"""The server's log as JSON, for a collector."""

import json
import logging
import sys
from datetime import datetime

from forebay.telemetry.log import JsonFormatter
from tests.conftest import MakeServer
from tests.kit import FAILS_WITH_A_HINT, Json, poll_until, write_generator

ENTRY = {"time", "level", "logger", "message"}


def test_each_line_of_the_servers_log_is_an_object_with_its_run(make_server: MakeServer, tmp_path) -> None:
    write_generator(tmp_path / "tasks", FAILS_WITH_A_HINT, "hints_generator.py")
    server = make_server(generators=tmp_path / "tasks", log_format="json")
    run = server.start_run("hints")
    poll_until(lambda: f"{run.run_id} (hints) has ended: failed" in server.log())
    server.stop()
    entries: list[Json] = [json.loads(line) for line in server.log().splitlines()]
    assert all(ENTRY <= entry.keys() <= ENTRY | {"run_id", "error"} for entry in entries)
    assert all(datetime.fromisoformat(entry["time"]).utcoffset() is not None for entry in entries)
    about = [entry for entry in entries if entry.get("run_id") == run.run_id]
    assert "failed" in about[-1]["message"]
    assert "uvicorn.error" in {entry["logger"] for entry in entries}


def test_an_entry_is_one_line_whatever_is_in_it_and_has_the_traceback() -> None:
    try:
        raise ValueError("its\ntext")
    except ValueError:
        args = ("run %s: %s", ("run-0123456789ab", "a\n\x1b[2J\u202e\udc80"), sys.exc_info())
    line = JsonFormatter().format(logging.LogRecord("forebay", logging.ERROR, "", 1, *args))
    assert line.isprintable()
    assert line.isascii()
    entry = json.loads(line)
    assert (entry["level"], entry["run_id"]) == ("error", "run-0123456789ab")
    assert entry["message"] == "run run-0123456789ab: a\n\x1b[2J\u202e\udc80"
    assert entry["error"].endswith("ValueError: its\ntext")
