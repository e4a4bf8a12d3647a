"""Writes that come compressed, or with one sample on each line."""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import zstandard

from tests.kit import Json, NativeRun, ServerProcess, assert_error, make_group, make_sample

NDJSON = {"Content-Type": "application/x-ndjson"}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, 1),
    "zstd": zstandard.ZstdCompressor(level=1).compress,
}


def post(run: NativeRun, body: bytes, **headers: str) -> httpx.Response:
    return run.client.post(f"{run.path}/samples", content=body, headers=headers)


def lines(*samples: Json) -> bytes:
    return b"".join(json.dumps(sample).encode() + b"\n" for sample in samples)


def verdicts(response: httpx.Response) -> list[Json]:
    assert response.status_code == 200, response.text
    results: list[Json] = response.json()["results"]
    return results


def test_each_line_is_a_sample_with_its_verdict(run: NativeRun) -> None:
    group = make_group("a", [0.0, 1.0, 0.5, 0.25])
    response = run.client.post(f"{run.path}/samples", content=lines(*group), headers=NDJSON)
    assert [result["uid"] for result in verdicts(response)] == [sample["uid"] for sample in group]
    assert {row["uid"] for row in run.read(num_groups=1)["data"]} == {sample["uid"] for sample in group}


def test_a_wrong_line_is_named_and_costs_no_other(run: NativeRun) -> None:
    good, late = make_sample(uid="good"), make_sample(uid="late")
    body = lines(good) + b"\n" + lines(make_sample(uid="bad", reward="x")) + b"{\r\n" + lines(late)
    first, bad, broken, last = verdicts(run.client.post(f"{run.path}/samples", content=body, headers=NDJSON))
    assert (first["uid"], last["uid"]) == ("good", "late")
    assert (bad["status"], bad["line"], bad["error"]["field"]) == (422, 3, "reward")
    assert bad["error"]["message"].startswith("line 3: ")
    assert (broken["line"], broken["error"]["field"]) == (4, "body")


def test_a_last_line_needs_no_end_and_none_is_no_mistake(run: NativeRun) -> None:
    assert len(verdicts(run.client.post(f"{run.path}/samples", content=lines(make_sample())[:-1], headers=NDJSON))) == 1
    assert verdicts(run.client.post(f"{run.path}/samples", content=b"", headers=NDJSON)) == []


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson"])
def test_a_compressed_body_is_stored_as_what_it_stands_for(run: NativeRun, coding: str, kind: str) -> None:
    group = make_group("a", [0.0, 1.0, 0.5, 0.25], messages=[{"role": "user", "content": "x" * 300_000}])
    plain = json.dumps(group).encode() if kind == "application/json" else lines(*group)
    response = post(run, COMPRESS[coding](plain), **{"Content-Type": kind, "Content-Encoding": coding})
    assert [result["outcome"] for result in verdicts(response)] == ["member"] * 4
    assert all(row["messages"] == group[0]["messages"] for row in run.read(num_groups=1)["data"])


@pytest.mark.parametrize("coding", COMPRESS)
def test_several_streams_in_one_body_are_one_body(run: NativeRun, coding: str) -> None:
    body = b"".join(COMPRESS[coding](lines(sample)) for sample in make_group("a", [0.0, 1.0, 0.5]))
    response = post(run, body, **NDJSON, **{"Content-Encoding": coding})
    assert len(verdicts(response)) == 3


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "trailing"])
def test_a_broken_stream_is_the_clients_mistake(run: NativeRun, coding: str, damage: str) -> None:
    whole = COMPRESS[coding](lines(make_sample(), make_sample()))
    body = {"cut": whole[:-5], "garbage": b"no stream at all", "empty": b"", "trailing": whole + b"rest"}[damage]
    response = post(run, body, **NDJSON, **{"Content-Encoding": coding})
    assert_error(response, 422, "invalid_input", "body")
    assert run.view()["groups"]["open"] == 0


def test_an_unknown_coding_is_refused(run: NativeRun) -> None:
    response = post(run, zlib.compress(lines(make_sample())), **NDJSON, **{"Content-Encoding": "deflate"})
    assert "gzip or zstd" in assert_error(response, 422, "invalid_input", "Content-Encoding")["hint"]


@pytest.mark.parametrize("coding", COMPRESS)
def test_the_limit_holds_for_what_comes_out(make_server: Callable[..., ServerProcess], coding: str) -> None:
    server = make_server(max_body_bytes=4 << 20)
    run = server.start_run()
    bomb = COMPRESS[coding](lines(make_sample(pad="PAD")).replace(b"PAD", b"x" * (256 << 20)))
    assert len(bomb) < 2 << 20
    assert_error(post(run, bomb, **NDJSON, **{"Content-Encoding": coding}), 413, "body_too_large")
    fits = COMPRESS[coding](lines(make_sample(messages=[], pad="x" * (3 << 20))))
    assert verdicts(post(run, fits, **NDJSON, **{"Content-Encoding": coding}))[0]["status"] == 200
    status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    peak = next(line for line in status if line.startswith("VmHWM"))
    assert int(peak.split()[1]) < 300 << 10
