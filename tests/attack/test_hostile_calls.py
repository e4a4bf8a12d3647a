"""Calls of an engine in a file that somebody else made: what no engine answers is named, and is a miss."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from forebay.replay import RecordedEngine
from forebay.replay.engine.call_frames import CallReply, Place, compressor, encode_call
from forebay.replay.engine.call_request import CallRequest
from forebay.replay.recording_schema import create
from tests.attack.hostile_files import forebay_in_time

BODY = b'{"messages":[]}'
REQUEST = CallRequest.read("POST", "/v1/chat/completions", BODY)
REPLIES: dict[str, dict[str, Any]] = {
    "a status below 200": {"status": 100},
    "a status beyond 599": {"status": 1000},
    "a status below 0": {"status": -1},
    "a status of any length": {"status": 10**30},
    "a body that its status rules out": {"status": 204},
    "two headers in one": {"content_type": "text/plain\r\nset-cookie: a=b"},
    "a header that is not Latin": {"content_type": "text/\u0101"},
    "a part that goes back": {"parts": [(0.0, b"ab"), (-1.0, b"c")]},
}
COLUMNS: dict[str, object] = {"method": b"POST", "path": b"/\xff", "lane": 3, "digest": "text", "request": "text"}


def write_calls(path: Path, *replies: dict[str, Any]) -> None:
    with closing(create(path)) as database:
        for seq, changes in enumerate(replies):
            reply = CallReply(200, "application/json", [(0.0, b"{}")])._replace(**changes)
            row = list(encode_call(Place(seq, seq, 1.0), REQUEST, reply, compressor()))
            row[7] = row[7] if abs(reply.status) < 1 << 63 else 200
            database.execute(f"INSERT INTO calls VALUES ({', '.join('?' * len(row))})", row)


def check_missed(path: Path) -> None:
    """The call is named and missed, the one behind it is answered, and nothing is raised."""
    with RecordedEngine(path).in_thread() as engine:
        assert 0 in engine.damaged
        replies = [httpx.post(f"{engine.url}/v1/chat/completions", content=BODY) for _ in range(2)]
        assert sorted(each.status_code for each in replies) == [200, 422]
        other = httpx.post(f"{engine.url}/v1/completions", content=BODY)
        assert other.status_code == 422
        assert len(engine.misses) == 2
        engine.misses.clear()
    verified = forebay_in_time("recording", "verify", path)
    assert (verified.returncode, "calls 0: " in verified.stdout) == (1, True), verified.stdout


@pytest.mark.parametrize("kind", REPLIES)
def test_a_reply_that_no_engine_gives_is_a_miss(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    write_calls(tmp_path / "calls.fbr", REPLIES[kind], {})
    check_missed(tmp_path / "calls.fbr")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_of_another_type_is_damage(tmp_path: Path, column: str) -> None:
    path = tmp_path / "calls.fbr"
    write_calls(path, {}, {})
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"UPDATE calls SET {column} = ? WHERE seq = 0", (COLUMNS[column],))
    check_columns(path)


def check_columns(path: Path) -> None:
    with RecordedEngine(path).in_thread() as engine:
        assert 0 in engine.damaged
        statuses = {httpx.post(f"{engine.url}{at}", content=BODY).status_code for at in (REQUEST.path, "/generate")}
        assert statuses <= {200, 422}
        engine.misses.clear()
    assert forebay_in_time("recording", "verify", path).returncode == 1


@pytest.mark.parametrize("status", [200, 204, 304, 599])
def test_every_status_of_an_answer_is_given(tmp_path: Path, status: int) -> None:
    write_calls(tmp_path / "calls.fbr", {"status": status, "parts": [(0.0, b"" if status in (204, 304) else b"{}")]})
    with RecordedEngine(tmp_path / "calls.fbr").in_thread() as engine:
        assert httpx.post(f"{engine.url}/v1/chat/completions", content=BODY).status_code == status


def test_a_reply_of_millions_of_parts_is_not_unfolded(tmp_path: Path) -> None:
    path, compress = tmp_path / "calls.fbr", compressor()
    head = {"seq": 0, "nth": 0, "began_s": 1.0, "status": 200, "headers": {}, "is_whole": True, "parts": []}
    parts = msgspec.json.encode(head)[:-2] + b"[0,0]" + b",[0,0]" * (40 << 20) + b"]}\n"
    write_calls(path, {}, {})
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE calls SET parts = ?, headers = '{}' WHERE seq = 0", (compress(parts),))
    check_missed(path)
