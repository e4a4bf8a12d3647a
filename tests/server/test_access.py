"""Who may reach the server, what of its disk a caller may name, and how large a body may be."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, ServerProcess, assert_error, first_line, make_sample, poll_until, write_generator

SECRET = {"Authorization": "Bearer secret"}
TELLS_ITS_KEY = """
import threading
TASK_TYPE = "tells"
def run_rollout(data):
    print(data["remote_buffer_url"])
    threading.Event().wait()
"""


# --- the token


@pytest.fixture(scope="module")
def guarded(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("tasks")
    write_generator(folder, TELLS_ITS_KEY, "tells_generator.py")
    return module_servers(generators=folder, token="secret", start_wait_s=60)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/runs"),
        ("POST", "/v1/runs"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("POST", "/start_rollout"),
        ("POST", "/buffer/write"),
        ("POST", "/s/a/buffer/write"),
        ("POST", "/get_rollout_data"),
        ("GET", "/no/such/route"),
        ("GET", "//healthz"),
    ],
)
def test_every_route_asks_for_the_token(guarded: ServerProcess, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer secreT"}, {"Authorization": "Bearer \u00fc".encode()}):
        answer = httpx.request(method, guarded.url + path, headers=headers, timeout=TIME_LIMIT_S)
        assert_error(answer, 401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz"])
def test_health_checks_need_no_token(guarded: ServerProcess, path: str) -> None:
    assert guarded.client.get(path).status_code == 200


def test_a_runs_key_works_without_the_token_for_its_own_writes_only(guarded: ServerProcess) -> None:
    body = {"task_type": "tells", "group_size": 1}
    run_id = guarded.client.post("/v1/runs", json=body, headers=SECRET).json()["run_id"]
    log = f"/v1/runs/{run_id}/log"
    url = poll_until(
        lambda: next((line for line in guarded.client.get(log, headers=SECRET).json()["lines"] if "/w/" in line), "")
    )
    assert httpx.post(f"{url}/buffer/write", json=make_sample(), timeout=TIME_LIMIT_S).status_code == 200
    assert httpx.post(f"{url}/samples", json=[make_sample()], timeout=TIME_LIMIT_S).status_code == 200
    assert httpx.get(f"{url}/plan", timeout=TIME_LIMIT_S).json()["run_id"] == run_id
    for path in ("get_rollout_data", "batches", "stop", "../../v1/runs", "..%2f..%2fv1/runs"):
        assert httpx.post(f"{url}/{path}", json={}, timeout=TIME_LIMIT_S).status_code in (401, 404, 405)
    assert len(guarded.client.get(f"/v1/runs/{run_id}/groups", headers=SECRET).json()["groups"]) == 2


# --- the address


def serve_once(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forebay.server.cli", "serve", "--port", "0", *flags]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)


def test_other_than_loopback_is_refused_without_a_token(tmp_path: Path) -> None:
    done = serve_once(tmp_path, "--host", "0.0.0.0")
    assert done.returncode != 0
    assert "listening on 0.0.0.0 without a token" in done.stderr
    assert "FOREBAY_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr


def test_listening_everywhere_names_an_address_for_other_machines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forebay.server.cli", "serve", "--port", "0", "--host", "0.0.0.0", "--insecure"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        line = first_line(serving.stdout, TIME_LIMIT_S)
        serving.terminate()
    port = re.escape(line.rpartition(":")[2])
    name = re.escape(socket.gethostname())
    assert re.fullmatch(
        rf"forebay listens on http://127\.0\.0\.1:{port}, for other machines on http://{name}:{port}", line
    )


def test_a_port_in_use_is_told(tmp_path: Path, server: ServerProcess) -> None:
    done = serve_once(tmp_path, "--port", str(server.port))
    assert done.returncode != 0
    assert f"port {server.port}" in done.stderr
    assert "Traceback" not in done.stderr


# --- the files that a caller may name


def test_an_input_file_is_read_only_below_the_allowed_folders(make_server: MakeServer, tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    for folder in (allowed, other):
        folder.mkdir()
        (folder / "in.jsonl").write_text("{}\n")
    (allowed / "link.jsonl").symlink_to(other / "in.jsonl")
    server = make_server(input_roots=allowed)
    body = {"task_type": "idle", "num_repeat_per_sample": 1}
    for refused in (other / "in.jsonl", allowed / ".." / "other" / "in.jsonl", allowed / "link.jsonl", "/etc/passwd"):
        answer = server.client.post("/start_rollout", json=body | {"input_file": str(refused)})
        error = assert_error(answer, 400, "input_refused", "input_file")
        assert "outside the allowed folders" in error["message"]
    missing = server.client.post("/start_rollout", json=body | {"input_file": str(other / "missing")})
    assert "outside" in assert_error(missing, 400, "input_refused", "input_file")["message"]
    assert server.client.post("/start_rollout", json=body | {"input_file": f"{allowed}/in.jsonl"}).status_code == 200


def test_a_recording_is_read_only_below_the_allowed_folders(make_server: MakeServer, tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    for folder in (allowed, other):
        folder.mkdir()
    (other / "run.fbr").write_text("no recording")
    (allowed / "link.fbr").symlink_to(other / "run.fbr")
    os.mkfifo(allowed / "pipe.fbr")
    (allowed / "folder.fbr").mkdir()
    server = make_server(input_roots=allowed)
    body = {"task_type": "idle", "num_repeat_per_sample": 1}
    for path in ("/start_rollout", "/v1/runs"):
        for source in (other / "run.fbr", other / "missing.fbr", allowed / "link.fbr", "/dev/zero", "../x.fbr"):
            answer = server.client.post(path, json=body | {"replay": str(source)})
            error = assert_error(answer, 400, "input_refused", "replay.source")
            assert "outside the allowed folders" in error["message"]
        for name in ("pipe.fbr", "folder.fbr", "missing.fbr"):
            answer = server.client.post(path, json=body | {"replay": f"{allowed}/{name}"})
            assert_error(answer, 404, "not_recorded", "replay.source")


# --- bodies


@contextmanager
def connection(server: ServerProcess) -> Iterator[socket.socket]:
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=TIME_LIMIT_S)) as opened:
        yield opened


def answer_of(opened: socket.socket) -> str:
    """The whole answer, whose headers tell its length."""
    with opened.makefile("rb") as stream:
        told = b"".join(iter(stream.readline, b"\r\n"))
        length = int(told.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return (told + stream.read(length)).decode()


def head(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


@pytest.fixture(scope="module")
def limited(module_servers: MakeServer) -> ServerProcess:
    return module_servers(max_body_bytes=100_000, max_bodies_bytes=100_000)


def test_an_announced_length_over_the_limit_is_refused_before_the_body_comes(limited: ServerProcess) -> None:
    run = limited.start_run()
    with connection(limited) as sent:
        sent.sendall(head(f"{run.path}/samples", "Content-Length: 900000000") + b'{"uid": ')
        answer = answer_of(sent)
    assert answer.startswith("HTTP/1.1 413 ")
    assert '"code":"body_too_large"' in answer


def test_a_body_without_a_length_is_refused_once_it_is_over_the_limit(limited: ServerProcess) -> None:
    run = limited.start_run()
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    with connection(limited) as sent:
        sent.sendall(head(f"{run.path}/samples", "Transfer-Encoding: chunked") + chunk * 8)
        answer = answer_of(sent)
    assert answer.startswith("HTTP/1.1 413 ")


@pytest.mark.parametrize("path", ["/start_rollout", "/s/a/start_rollout", "/v1/runs", "/buffer/read"])
def test_the_limit_holds_on_every_route_that_takes_a_body(limited: ServerProcess, path: str) -> None:
    limited.start_slime(group_size=1)
    body = {"task_type": "idle", "num_repeat_per_sample": 1, "padding": "x" * 100_000}
    assert_error(limited.client.post(path, json=body), 413, "body_too_large")


def test_bodies_in_flight_beyond_the_total_wait_for_room(limited: ServerProcess) -> None:
    run = limited.start_run()
    with connection(limited) as holder, ThreadPoolExecutor(1) as pool:
        holder.sendall(head(f"{run.path}/samples", "Content-Length: 99000") + b" " * 85_000)
        small = make_sample(uid="waits", padding="x" * 50_000)
        poll_until(lambda: _is_waiting(limited, run.path, pool))
        waiting = pool.submit(run.write, small)
        with pytest.raises(NotYet):
            waiting.result(0.3)
        holder.sendall(b" " * 14_000)
        assert " 422 " in answer_of(holder)
        assert waiting.result(TIME_LIMIT_S)[0]["status"] == 200


def _is_waiting(server: ServerProcess, path: str, pool: ThreadPoolExecutor) -> bool:
    """Whether the first body has taken its room: others of that size then get no answer."""
    try:
        httpx.post(f"{server.url}{path}/samples", content=b" " * 20_000, timeout=5)
    except httpx.ReadTimeout:
        return True
    return False


@pytest.mark.parametrize("route", ["samples", "checkpoints"])
def test_a_client_that_goes_away_in_its_body_gives_the_room_back(limited: ServerProcess, route: str) -> None:
    run = limited.start_run()
    for _ in range(3):
        with connection(limited) as gone:
            gone.sendall(head(f"{run.path}/{route}", "Content-Length: 90000") + b" " * 10)
    assert run.write(make_sample(padding="x" * 80_000))[0]["status"] == 200
    assert "Traceback" not in limited.log(), "it is no fault of the server's"
