"""Full text over what models and tools wrote in a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.core.records.rows import SampleRow
from forebay.server.search.text_index import TextIndex
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, make_group, make_sample, poll_until
from tests.server.test_bad_input import fill

SECRET = "os._exit(0)  # 100% 中文测试"


def said(final: str, *, tool: str = "nothing", thought: str = "") -> list[Json]:
    """A question, a call with its result, and the last answer."""
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": f'{{"why": "{thought}"}}'}}
    return [
        {"role": "user", "content": "asked by the user"},
        {"role": "assistant", "content": "an earlier answer", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": tool},
        {"role": "assistant", "content": final},
    ]


def search(run: NativeRun, text: str = "", **asked: Any) -> Json:
    reply = run.client.get(f"{run.path}/search", params={"text": text, **asked})
    assert reply.status_code == 200, reply.text
    found: Json = reply.json()
    return found


def complete(run: NativeRun, num_samples: int, text: str = "", **asked: Any) -> Json:
    """The reply once that many samples are searched."""
    poll_until(lambda: not (found := search(run))["is_building"] and found["num_searched"] == num_samples)
    return search(run, text, **asked)


@pytest.fixture(params=["journal", "memory"])
def run(make_server: MakeServer, request: pytest.FixtureRequest) -> NativeRun:
    run = make_server(store=request.param).start_run(group_size=2)
    for number in range(50):
        texts = said("fine", tool=f"before {SECRET} after") if number % 10 == 0 else said("fine")
        run.write(*make_group(f"task-{number}", [0.0, float(number)], messages=texts))
    return run


def test_a_text_is_found_with_its_share_and_its_rewards(run: NativeRun) -> None:
    found = complete(run, 100, SECRET, limit=3)
    assert (found["num_with"], found["num_searched"], found["mean_with"]) == (10, 100, 10.0)
    assert found["mean_without"] == pytest.approx((sum(range(50)) - 100) / 90)
    assert [hit["instance_id"] for hit in found["samples"]] == ["task-40", "task-40", "task-30"]
    assert found["samples"][0]["excerpt"] == f"before {SECRET} after\nfine"
    assert search(run, "OS._EXIT(0)")["num_with"] == 10
    assert search(run, "os__exit")["num_with"] == search(run, "0% 100%")["num_with"] == 0
    assert search(run, "asked by")["num_with"] == search(run, "an earlier")["num_with"] == 0
    narrowed = search(run, "中文测试", instance="task-4", min_reward=1)
    assert (narrowed["num_with"], narrowed["num_searched"]) == (1, 11)


def test_new_groups_are_found_once_they_are_complete(run: NativeRun) -> None:
    complete(run, 100)
    first, second = make_group("late", [0.0, 1.0], messages=said("brand new words"))
    run.write(first)
    poll_until(lambda: search(run)["num_open_groups"] == 1)
    assert search(run, "brand new")["num_with"] == 0
    run.write(second)
    complete(run, 102)
    assert [hit["uid"] for hit in search(run, "brand new")["samples"]] == ["late/0", "late/1"]


def test_what_cannot_be_searched(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    odd = [
        make_sample(uid="a", reward=0.0, messages=["bare words"]),
        make_sample(uid="b", messages=[["words"], 7, {"role": 3}]),
    ]
    run.write(*odd, *make_group("nul", [0.0, 1.0], messages=said("before\0after")))
    assert complete(run, 4, "words")["num_with"] == 0
    assert search(run, "after")["num_with"] == 2
    short = run.client.get(f"{run.path}/search", params={"text": "ab"})
    assert (short.status_code, short.json()["error"]["field"]) == (422, "text")
    assert run.client.get("/v1/runs/none/search").status_code == 404
    server.stop()
    assert "Traceback" not in server.log()


def test_more_runs_than_indexes_are_refused_and_none_stops_the_others(make_server: MakeServer) -> None:
    server = make_server()
    runs = [server.start_run(group_size=2) for _ in range(5)]
    for run in runs[:4]:
        assert complete(run, 0)["problem"] == ""
        run.write(*make_group("a", [0.0, 1.0], messages=said("words")))
        complete(run, 2)
    refused = runs[4].client.get(f"{runs[4].path}/search")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert [search(run, "words")["num_with"] for run in runs[:4]] == [2, 2, 2, 2]


def test_a_full_temporary_folder_is_a_problem_that_the_reply_names(
    small_disk: Path, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLITE_TMPDIR", str(small_disk))
    fill(small_disk)
    server = make_server()
    run = server.start_run(group_size=1)
    run.write(*(make_sample(uid=f"{n}", instance_id=n, messages=said(f"{n} " * 200_000)) for n in range(10)))
    assert "full" in poll_until(lambda: search(run, "words")["problem"])
    assert search(run, "words")["num_searched"] == 0
    assert "Traceback" not in server.log()


def test_groups_are_found_after_the_disk_was_full(small_disk: Path, make_server: MakeServer) -> None:
    run = make_server(data_dir=small_disk / "data", segment_bytes=1 << 16).start_run(group_size=2)
    first, second = make_group("late", [0.0, 1.0], messages=said("words"))
    run.write(first)
    poll_until(lambda: search(run)["num_open_groups"] == 1)
    ballast = fill(small_disk)
    large = make_sample(messages=said("x" * 100_000))
    poll_until(lambda: run.client.post(f"{run.path}/samples", json=large).status_code == 507)
    ballast.unlink()
    poll_until(lambda: run.client.get("/readyz").status_code == 200)
    run.write(second)
    assert poll_until(lambda: search(run, "words")["num_with"]) == 2


def test_a_full_index_keeps_the_newest() -> None:
    index = TextIndex(most_bytes=300)

    def add(number: int, text: str) -> None:
        at = {"outcome": "member", "reward": 1.0, "at_s": 0.0, "received_at_s": 0.0}
        row = SampleRow(run_id="r", group_id=f"g{number}", uid="u", instance_id=number, epoch=0, slot=0, **at)
        index.add([(number, row, json.dumps({"messages": said(text)}).encode())])

    for number in (5, 4, 6, 3):
        add(number, f"text {number}".ljust(100))
    found = index.find("text", "", None, 9)
    assert [each["group_id"] for each in found.samples] == ["g6", "g5"]
    assert index.is_full
    add(7, "x" * 300)
    assert index.find("text", "", None, 9).num_with == 2
    index.close()
