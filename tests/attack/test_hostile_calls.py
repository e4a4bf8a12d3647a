"""Calls of an engine in a file that somebody else made: what no engine answers is refused."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.core.records.record_file import encode_record
from forebay.replay import RecordedEngine
from forebay.replay.call_request import CallRequest
from forebay.replay.errors import RecordingDamaged
from forebay.replay.frames import compressor
from forebay.replay.recorded_calls import CallReply, RecordedCall, encode_call
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


def write_call(path: Path, **changes: Any) -> None:
    reply = CallReply(200, "application/json", [(0.0, b"{}")])._replace(**changes)
    path.write_bytes(encode_record(*encode_call(RecordedCall(1, 1.0, REQUEST, reply), compressor()), 0))


@pytest.mark.parametrize("kind", REPLIES)
def test_a_reply_that_no_engine_gives_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "calls.fbr"
    write_call(path, **REPLIES[kind])
    with pytest.raises(RecordingDamaged), RecordedEngine(path).in_thread():
        pass
    assert forebay_in_time("recording", "verify", path).returncode == 1


@pytest.mark.parametrize("status", [200, 204, 304, 599])
def test_every_status_of_an_answer_is_given(tmp_path: Path, status: int) -> None:
    write_call(tmp_path / "calls.fbr", status=status, parts=[(0.0, b"" if status in (204, 304) else b"{}")])
    with RecordedEngine(tmp_path / "calls.fbr").in_thread() as engine:
        assert httpx.post(f"{engine.url}/v1/chat/completions", content=BODY).status_code == status
