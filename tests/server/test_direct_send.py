"""Replies past the framework: with the uvicorn that is installed, and with one whose inside is not known."""

import json
import os
from pathlib import Path

import pytest

from forebay.core.settings import Settings
from forebay.web.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from forebay.web.http_protocol import BoundedProtocol, http_protocol
from tests.conftest import MakeServer
from tests.kit import ServerProcess, make_sample

OTHER_UVICORN = """
from pathlib import Path
from uvicorn.protocols.http import httptools_impl as inside
source = Path(inside.__file__).read_text()
exec(compile(source.replace("expected_content_length", "bytes_left"), inside.__file__, "exec"), inside.__dict__)
"""
"""As another release may be: one attribute has another name."""
TEXT = "0123456789abcdef" * (1 << 14)
NUM_GROUPS = 12


def changed_uvicorn(folder: Path) -> dict[str, str]:
    """The environment of a server that meets it."""
    (folder / "sitecustomize.py").write_text(OTHER_UVICORN)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def read_bytes(server: ServerProcess) -> bytes:
    """All that was written, as one reply: large enough to go past the framework."""
    run = server.start_run(group_size=2)
    for number in range(NUM_GROUPS):
        uids = [f"{number}/{n}" for n in range(2)]
        run.write(*(make_sample(uid=u, instance_id=number, reward=float(u[-1]), text=u + TEXT) for u in uids))
    reply = run.client.post(f"{run.path}/batches", json={"num_groups": NUM_GROUPS, "request_id": "one"})
    assert reply.status_code == 200
    assert int(reply.headers["content-length"]) == len(reply.content)
    return reply.content


def rows_of(reply: bytes) -> bytes:
    """The rows alone: what stands around them tells the batch."""
    return reply[reply.index(b'"data":[') : reply.index(b'],"meta_info":')]


def test_the_installed_uvicorn_is_known(caplog: pytest.LogCaptureFixture) -> None:
    protocol = http_protocol(DEFAULT_LIMITS)
    assert isinstance(protocol, type)
    assert issubclass(protocol, BoundedProtocol)
    assert not caplog.records


def test_the_bounds_of_engines_are_the_defaults_of_the_servers() -> None:
    assert ConnectionLimits.of(Settings()) == DEFAULT_LIMITS


@pytest.mark.parametrize(
    "name", ["httptools_impl.RequestResponseCycle", "httptools_impl.HttpToolsProtocol", "flow_control.FlowControl"]
)
def test_what_is_missing_in_uvicorn_is_logged_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"uvicorn.protocols.http.{name}.__init__", lambda _: None)
    assert http_protocol(DEFAULT_LIMITS) == "httptools"
    assert "large replies are sent through the framework" in caplog.text
    for bound in ("max_head_bytes", "head_timeout_s", "body_timeout_s", "before the one ahead"):
        assert bound in caplog.text


def test_with_another_uvicorn_inside_reads_are_the_same_byte_for_byte(make_server: MakeServer, tmp_path: Path) -> None:
    known, other = make_server(), make_server(env=changed_uvicorn(tmp_path))
    assert "has no expected_content_length: large replies are sent through the framework" in other.log()
    assert "through the framework" not in known.log()
    direct, ordinary = rows_of(read_bytes(known)), rows_of(read_bytes(other))
    assert len(direct) > 2 * NUM_GROUPS * len(TEXT)
    assert direct == ordinary


def test_a_server_with_another_uvicorn_inside_takes_writes_and_ends_well(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(env=changed_uvicorn(tmp_path))
    run = server.start_slime("other")
    reply = run.send(make_sample(uid="first"))
    assert json.loads(reply.content)["data"]["data"][0]["uid"] == "first"
    run.stop()
    assert server.stop() == 0
