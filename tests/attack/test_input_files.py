"""Input files that never end, never answer, or lie elsewhere: each costs its own start, and nothing else."""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attack.start_code import python_path_with
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, ServerProcess, assert_error, make_sample

DEAD_MOUNT = """
import os, threading
def hangs(call):
    def hanging(path, *args, **kwargs):
        if "dead-mount" in os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else False:
            threading.Event().wait()
        return call(path, *args, **kwargs)
    return hanging
for name in ("stat", "lstat", "open", "readlink"):
    setattr(os, name, hangs(getattr(os, name)))
"""
ENGINE = {"remote_engine_url": "http://127.0.0.1:9"}


def body_for(path: object, **changes: Any) -> dict[str, Any]:
    return {"task_type": "math", "group_size": 2, "input_file": str(path), **ENGINE, **changes}


def refusal(server: ServerProcess, path: object, **changes: Any) -> dict[str, Any]:
    """How a start with this file is refused, and how quickly."""
    began_s = time.monotonic()
    error = assert_error(
        server.client.post("/v1/runs", json=body_for(path, **changes)), 400, "input_refused", "input_file"
    )
    assert time.monotonic() - began_s < TIME_LIMIT_S
    return error


def test_only_a_regular_file_is_read(server: ServerProcess, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        kinds = {
            tmp_path / "pipe": "a named pipe",
            tmp_path / "socket": "a socket",
            tmp_path: "a directory",
            Path("/dev/zero"): "a device",
            Path("/dev/stdin"): "",
        }
        (tmp_path / "link").symlink_to(tmp_path / "pipe")
        for path, kind in {**kinds, tmp_path / "link": "a named pipe"}.items():
            for changes in ({}, {"task_type": "idle"}):
                assert kind in refusal(server, path, **changes)["message"]
    started = server.client.post("/start_rollout", json=body_for(tmp_path / "pipe", num_repeat_per_sample="2"))
    assert started.status_code == 400


def test_a_line_without_end_is_not_held(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(max_input_line_bytes=1 << 20)
    endless = tmp_path / "endless.jsonl"
    with endless.open("wb") as file:
        file.truncate(64 << 30)  # a hole: it takes no room on the disk
    assert "longer than 1048576 bytes" in refusal(server, endless)["message"]
    status = Path(f"/proc/{server.pid}/status").read_text()
    [peak_kib] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    assert peak_kib < 500 << 10, peak_kib


def test_a_link_out_of_the_roots_is_refused_whenever_it_is_put_there(make_server: MakeServer, tmp_path: Path) -> None:
    roots, outside = tmp_path / "roots", tmp_path / "outside"
    for folder in (roots, outside):
        folder.mkdir()
        (folder / "rows.jsonl").write_text('{"prompt": "1 + 1"}\n' if folder == roots else "a secret\n")
    server = make_server(input_roots=roots)
    (roots / "link").symlink_to(outside / "rows.jsonl")
    assert "outside" in refusal(server, roots / "link")["message"]
    swapped, is_over = roots / "swapped", threading.Event()
    swapped.symlink_to(roots / "rows.jsonl")

    def swap() -> None:
        while not is_over.is_set():
            for target in (outside, roots):
                (roots / "next").symlink_to(target / "rows.jsonl")
                (roots / "next").rename(swapped)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        answers = [server.client.post("/v1/runs", json=body_for(swapped)) for _ in range(10)]
    finally:
        is_over.set()
        thread.join()
    for answer in answers:
        # The bytes of the file outside are no JSON: an error that says so would have read them.
        assert answer.status_code == 201 or "outside" in answer.json()["error"]["message"], answer.text
    for run in server.client.get("/v1/runs").json()["runs"]:
        server.client.post(f"/v1/runs/{run['run_id']}/stop")


def test_a_pipe_that_takes_the_place_of_the_file_ends_the_run(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(max_restarts=0)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1"}\n')
    run = server.start_run("math", input_file=str(rows), num_epoch=1_000, **ENGINE)
    run.wait_for_state("running")
    server.stop()
    rows.unlink()
    os.mkfifo(rows)
    server.restart()
    failed = run.wait_for_state("failed")
    assert "a named pipe, not a regular file" in failed["reason"]


def test_a_file_that_never_answers_holds_up_neither_other_starts_nor_the_end(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(env=python_path_with(tmp_path, DEAD_MOUNT), input_wait_s=5)
    answers: list[httpx.Response] = []

    def ask(route: str) -> None:
        body = body_for("/dead-mount/rows.jsonl", num_repeat_per_sample="2")
        answers.append(httpx.post(f"{server.url}{route}", json=body, timeout=30))

    threads = [
        threading.Thread(target=ask, args=(route,))
        for route in ("/v1/runs", "/start_rollout", "/s/b/start_rollout") * 4
    ]
    for thread in threads:
        thread.start()
    began_s = time.monotonic()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1"}\n')
    assert server.client.post("/v1/runs", json=body_for(tmp_path / "rows.jsonl")).status_code == 201
    assert server.start_run().write(make_sample())
    assert time.monotonic() - began_s < TIME_LIMIT_S
    for thread in threads:
        thread.join()
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert "did not respond within 5 s" in answer.json()["error"]["message"]
    began_s = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began_s < TIME_LIMIT_S


BAD_TEXTS = ("a\0b", "\ud800", "x\udfff")


@pytest.mark.parametrize("route", ["/v1/runs", "/start_rollout", "/s/texts/start_rollout"])
@pytest.mark.parametrize("text", BAD_TEXTS, ids=ascii)
def test_a_text_that_nothing_takes_is_named(server: ServerProcess, route: str, text: str) -> None:
    good: dict[str, Any] = {"task_type": "idle", "num_repeat_per_sample": "2", "told_at": route}
    for field in (
        "task_type",
        "name",
        "run_id",
        "start_id",
        "input_file",
        "template_path",
        "remote_engine_url",
        "notes",
    ):
        assert_error(server.client.post(route, content=encoded(good | {field: text})), 422, "invalid_input", field)
    nested: dict[str, Any] = {"skip_instance_ids": ["good", text], "sampling_params": {"deep": [{"er": {text: 1}}]}}
    for field, value in nested.items():
        assert_error(server.client.post(route, content=encoded(good | {field: value})), 422, "invalid_input", field)
    assert_error(server.client.post(route, content=encoded(good | {text: 1})), 422, "invalid_input", "body")
    assert server.client.get("/readyz").is_success


@pytest.mark.parametrize("text", BAD_TEXTS, ids=ascii)
def test_no_other_body_with_such_a_text_is_a_5xx(server: ServerProcess, text: str) -> None:
    run = server.start_slime("odd-texts")
    for field in ("uid", "instance_id", "rollout_id", "status", "error"):
        content = encoded(make_sample(**{field: text}))
        for path in (f"{run.path}/samples", "/s/odd-texts/buffer/write"):
            answer = server.client.post(path, content=content)
            assert answer.status_code < 500, answer.text
            if field in ("uid", "instance_id"):
                assert_refused(answer)
    bodies = {
        "batches": {"num_groups": 1, "request_id": text},
        "checkpoints": {"step": 1, "batch_ids": [text]},
        "rewind": {"step": text},
    }
    for action, body in bodies.items():
        assert 400 <= server.client.post(f"{run.path}/{action}", content=encoded(body)).status_code < 500
    for query in ("log?uid=%00", "log?uid=%ED%A0%80", "groups?after=%00", "groups/%00", "groups?state=%00"):
        assert server.client.get(f"{run.path}/{query}").status_code < 500, query
    assert server.client.get("/readyz").is_success


def assert_refused(answer: httpx.Response) -> None:
    if answer.status_code == 200:  # a list of samples has a verdict for each
        [verdict] = answer.json()["results"]
        assert verdict["status"] == 422, verdict
    else:
        assert answer.status_code == 422, answer.text


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
