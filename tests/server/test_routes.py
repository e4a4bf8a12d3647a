"""Every route of the wire and of the native API, as a client meets it."""

import json
import re
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import (
    NativeRun,
    ServerProcess,
    SlimeRun,
    assert_error,
    make_group,
    make_sample,
    poll_until,
    write_generator,
)

GOOD = [0.0, 1.0, 0.0, 1.0]

NATIVE = {
    "/v1/runs": {"get", "post"},
    "/v1/runs/{run_id}": {"delete", "get"},
    "/v1/runs/{run_id}/stop": {"post"},
    "/v1/runs/{run_id}/log": {"get"},
    "/v1/runs/{run_id}/samples": {"post"},
    "/v1/runs/{run_id}/batches": {"get", "post"},
    "/v1/runs/{run_id}/batches/{batch_id}/ack": {"post"},
    "/v1/runs/{run_id}/batches/{batch_id}/release": {"post"},
    "/v1/runs/{run_id}/batches/{batch_id}/extend": {"post"},
    "/v1/runs/{run_id}/checkpoints": {"get", "post"},
    "/v1/runs/{run_id}/rewind": {"post"},
    "/v1/runs/{run_id}/weight_version": {"put"},
    "/v1/runs/{run_id}/groups": {"get"},
    "/v1/runs/{run_id}/groups/{group_id}": {"get"},
    "/v1/runs/{run_id}/closed_groups": {"get"},
    "/v1/runs/{run_id}/skip_instance_ids": {"get"},
    "/v1/generators": {"get"},
    "/v1/gc": {"post"},
    "/healthz": {"get"},
    "/readyz": {"get"},
    "/metrics": {"get"},
}
SLIME = {
    "/": {"get"},
    "/start_rollout": {"post"},
    "/buffer/write": {"post"},
    "/buffer/read": {"post"},
    "/buffer/peek": {"get"},
    "/buffer/stats": {"get"},
    "/get_rollout_data": {"post"},
    "/rollout_status": {"get"},
    "/stop_rollout": {"post"},
}
PRINTS = """
import json, threading
TASK_TYPE = "prints"
def run_rollout(data):
    print("payload", json.dumps(data), "whole", flush=True)
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def own(module_servers: MakeServer) -> ServerProcess:
    """A server whose default stream and generators these tests may change."""
    return module_servers(start_wait_s=60)


# --- which routes there are


def test_the_openapi_document_lists_every_route(server: ServerProcess) -> None:
    listed = {path: set(told) for path, told in server.client.get("/openapi.json").json()["paths"].items()}
    streams = {f"/s/{{name}}{path}": methods for path, methods in SLIME.items()}
    for path, methods in (NATIVE | SLIME | streams).items():
        assert listed.get(path) == methods, path
    run_process = {path for path in listed if path.startswith("/w/")}
    assert run_process >= {f"/w/{{run_key}}/{name}" for name in ("buffer/write", "samples", "plan", "progress")}


def test_every_listed_route_answers_and_never_with_a_5xx(server: ServerProcess) -> None:
    for path, methods in server.client.get("/openapi.json").json()["paths"].items():
        for method in methods:
            answer = server.client.request(
                method, re.sub(r"{\w+}", "none", path), content=b"{}" if method in ("post", "put") else None
            )
            assert answer.status_code < 500, (method, path)
            assert answer.status_code != 405, (method, path)
            if answer.status_code >= 400:
                assert_error(
                    answer, answer.status_code, answer.json()["error"]["code"], answer.json()["error"].get("field")
                )


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "no_such_route"),
        ("GET", "/v1/runs/run-none", 404, "run_not_found"),
        ("POST", "/v1/runs/run-none/stop", 404, "run_not_found"),
        ("GET", "/v1/runs/run-none/log", 404, "run_not_found"),
        ("GET", "/v1/runs/run-none/groups", 404, "run_not_found"),
        ("GET", "/v1/runs/run-none/closed_groups", 404, "run_not_found"),
        ("GET", "/v1/runs/run-none/skip_instance_ids", 404, "run_not_found"),
        ("POST", "/v1/runs/run-none/batches", 404, "run_not_found"),
        ("GET", "/w/no-key/plan", 404, "run_not_found"),
        ("DELETE", "/v1/runs", 405, "method_not_allowed"),
        ("GET", "/s/nobody/buffer/stats", 410, "no_run"),
        ("GET", "/s/nobody/buffer/peek", 410, "no_run"),
        ("POST", "/s/nobody/get_rollout_data", 410, "no_run"),
        ("POST", "/s/nobody/buffer/read", 410, "no_run"),
    ],
)
def test_every_error_has_the_one_body(server: ServerProcess, method: str, path: str, status: int, code: str) -> None:
    assert_error(server.client.request(method, path), status, code)


@pytest.mark.parametrize("query", ["limit=0", "limit=many", "state=odd"])
def test_a_wrong_query_is_422_and_names_the_parameter(run: NativeRun, query: str) -> None:
    answer = run.client.get(f"{run.path}/groups?{query}")
    assert_error(answer, 422, "invalid_input", query.partition("=")[0])


def test_an_unknown_group_is_404(run: NativeRun) -> None:
    assert_error(run.client.get(f"{run.path}/groups/0000"), 404, "group_not_found")
    assert_error(run.client.get(f"{run.path}/groups?after=0000"), 404, "group_not_found")


# --- slime's routes


def test_a_start_says_rollout_started(server: ServerProcess) -> None:
    answer = server.client.post("/s/started/start_rollout", json={"task_type": "idle", "num_repeat_per_sample": "2"})
    assert answer.status_code == 200
    assert answer.json()["message"] == "Rollout started"
    assert server.client.get("/s/started/").json()["message"]
    server.client.post(f"/v1/runs/{answer.json()['run_id']}/stop")


def test_a_write_gives_the_item_back_in_the_envelope(slime: SlimeRun) -> None:
    sample = make_sample(uid="w", tool_calls=[{"deep": [1, 2.5, None]}], text="Grüße")
    assert slime.send(sample).json() == {
        "success": True,
        "message": "the sample is stored",
        "duplicate": False,
        "data": {"data": [sample], "meta_info": "write to buffer"},
    }


def test_nothing_ready_is_a_200_without_success(slime: SlimeRun) -> None:
    answer = slime.fetch()
    meta = answer["data"]["meta_info"]
    assert (answer["success"], answer["data"]["data"]) == (False, [])
    numbers = {"total_samples", "num_groups", "avg_group_size", "avg_reward", "reward_std", "reward_min", "reward_max"}
    assert set(meta) == numbers | {"finished_groups"}


def test_read_waits_up_to_its_timeout_and_peek_and_stats_take_nothing(slime: SlimeRun) -> None:
    path = f"{slime.prefix}/buffer/read"
    assert slime.client.post(path, json={"batch_size": 4, "timeout": 0.05, "wait": True}).json()["success"] is False
    for sample in make_group("g", GOOD):
        slime.send(sample)
    peeked = slime.client.get(f"{slime.prefix}/buffer/peek").json()
    assert {row["instance_id"] for row in peeked["data"]["data"]} == {"g"}
    stats = {"current_size": 4, "max_size": 1_000_000_000, "total_written": 4, "total_read": 0}
    assert slime.client.get(f"{slime.prefix}/buffer/stats").json()["data"] == {"data": [stats], "meta_info": {}}
    rows = slime.client.post(path, json={"batch_size": "4", "timeout": 5, "wait": True}).json()["data"]["data"]
    assert [row["uid"] for row in rows] == ["g/0", "g/1", "g/2", "g/3"]
    stats |= {"current_size": 0, "total_read": 4}
    assert slime.client.get(f"{slime.prefix}/buffer/stats").json()["data"] == {"data": [stats], "meta_info": {}}


def test_the_root_and_each_name_are_streams_of_their_own(own: ServerProcess) -> None:
    server = own
    runs = [server.start_slime(name, group_size=1) for name in ("", "left", "right")]
    native = server.start_run(group_size=1)
    assert len({run.run_id for run in runs}) == 3
    for run in runs:
        run.send(make_sample(instance_id=f"of {run.prefix}", reward=0.5))
    for run in runs:
        assert [group["instance_id"] for group in run.groups()] == [f"of {run.prefix}"]
    assert native.groups() == []


# --- a run's own address


def printed_payload(run: SlimeRun) -> dict[str, Any]:
    """Nothing before its line is whole: a log may end in the middle of one."""
    lines: list[str] = run.client.get(f"{run.path}/log").json()["lines"]
    told = next((line for line in lines if "payload " in line and line.endswith(" whole")), "")
    return json.loads(told.partition("payload ")[2].removesuffix(" whole")) if told else {}


def test_a_generator_writes_to_its_own_run_whatever_was_started_since(own: ServerProcess) -> None:
    server = own
    write_generator(server.generators, PRINTS, "prints_generator.py")
    first = server.start_slime(task_type="prints", remote_buffer_url="http://10.0.0.1:8889", num_process="7")
    payload = poll_until(lambda: printed_payload(first))
    assert payload["remote_buffer_url"].startswith(f"{server.url}/w/")
    assert (payload["num_process"], payload["num_repeat_per_sample"], payload["skip_instance_ids"]) == ("7", "4", [])
    first.write(make_sample())  # an open group keeps the run from ending when the next one starts
    second = server.start_slime()
    answer = server.client.post(f"{payload['remote_buffer_url']}/buffer/write", json=make_sample())
    assert answer.json()["data"]["meta_info"] == "write to buffer"
    assert ([group["num_samples"] for group in first.groups()], second.groups()) == ([2], [])
    [verdict] = server.client.post(f"{payload['remote_buffer_url']}/samples", json=[make_sample()]).json()["results"]
    assert verdict["outcome"] == "member"
    plan = server.client.get(f"{payload['remote_buffer_url']}/plan").json()
    assert (plan["run_id"], plan["group_size"]) == (first.run_id, 4)


# --- native routes


def test_runs_are_started_listed_inspected_and_stopped(server: ServerProcess) -> None:
    answer = server.client.post("/v1/runs", json={"task_type": "idle", "group_size": 2, "name": "mine"})
    assert answer.status_code == 201
    run = NativeRun(server, answer.json()["run_id"])
    assert run.run_id in [each["run_id"] for each in server.client.get("/v1/runs").json()["runs"]]
    view = run.wait_for_state("running")
    assert (view["name"], view["task_type"], view["origin"], view["has_ended"]) == ("mine", "idle", "native", False)
    assert view["settings"]["group_size"] == 2
    assert "run_key" not in json.dumps(view)
    assert run.stop()["state"] == "stopped"
    assert run.stop()["state"] == "stopped"


def test_groups_are_listed_by_page_and_state_and_shown_with_their_samples(run: NativeRun) -> None:
    for number in range(3):
        run.write(*make_group(number, GOOD))
    run.write(make_sample(instance_id="3", uid="half"))
    run.take(num_groups=1)
    groups = run.groups()
    assert [(group["instance_id"], group["state"]) for group in groups] == [
        (0, "acked"),
        (1, "ready"),
        (2, "ready"),
        ("3", "open"),
    ]
    assert run.groups(state="ready") == groups[1:3]
    assert run.groups(after=groups[0]["group_id"], limit=2) == groups[1:3]
    shown = run.group(groups[3]["group_id"])
    [sample] = shown.pop("samples")
    assert shown == groups[3]
    assert (sample["uid"], sample["slot"], sample["outcome"], sample["status"]) == ("half", 0, "member", "completed")
    bodies = run.client.get(f"{run.path}/groups/{groups[3]['group_id']}?bodies=true").json()["samples"]
    assert bodies[0]["body"]["uid"] == "half"


def test_instance_ids_keep_their_json_type(run: NativeRun) -> None:
    run.write(*make_group(1, GOOD), *[s | {"uid": "s" + s["uid"]} for s in make_group("1", GOOD)])
    batch = run.read(num_groups=2)
    assert [row["instance_id"] for row in batch["data"]] == [1] * 4 + ["1"] * 4
    assert batch["meta_info"]["finished_groups"] == [1, "1"]
    assert run.client.get(f"{run.path}/skip_instance_ids").json() == {"skip_instance_ids": [1, "1"]}


def test_epoch_and_slot_decide_where_a_sample_goes(run: NativeRun) -> None:
    verdicts = run.write(
        make_sample(epoch=1, slot=3),
        make_sample(epoch=0, slot=0),
        make_sample(epoch=1, slot=3),
        make_sample(epoch=1, slot=4),
    )
    assert [verdict["outcome"] for verdict in verdicts] == ["member", "member", "surplus", "surplus"]
    assert sorted((group["epoch"], group["num_samples"]) for group in run.groups()) == [(0, 1), (1, 1)]


def test_a_failed_sample_fills_its_slot_and_keeps_its_error(run: NativeRun) -> None:
    failed = make_sample(status="failed", error={"type": "ToolError", "message": "no shell"}, reward=..., uid="f")
    assert run.write(failed)[0]["outcome"] == "failed"
    run.write(*make_group("task-1", [0.0, 1.0, 1.0]))
    batch = run.read(batch_size=4)
    assert {row["uid"] for row in batch["data"]} == {"task-1/0", "task-1/1", "task-1/2"}
    [group] = run.groups()
    shown = next(s for s in run.group(group["group_id"])["samples"] if s["uid"] == "f")
    assert (shown["status"], shown["reward"], shown["error"]) == ("failed", None, "ToolError: no shell")


def test_closed_groups_are_followed_by_number(run: NativeRun) -> None:
    run.write(*make_group("a", GOOD), *make_group("b", [0.5] * 4))
    run.take(num_groups=1)
    feed = run.client.get(f"{run.path}/closed_groups").json()
    assert [(g["seq"], g["instance_id"], g["state"], g["reason"]) for g in feed["groups"]] == [
        (1, "a", "acked", ""),
        (2, "b", "discarded", "invalid"),
    ]
    assert (feed["last"], feed["run_state"]) == (2, "running")
    assert run.client.get(f"{run.path}/closed_groups?after=1").json()["groups"] == feed["groups"][1:]
    assert run.client.get(f"{run.path}/closed_groups?after=2&wait_s=0.05").json()["groups"] == []


def test_generators_tell_what_was_found_and_what_failed(own: ServerProcess) -> None:
    server = own
    write_generator(server.generators, "import no_such_module\nTASK_TYPE = 'broken'\n", "broken_generator.py")
    listed = {g["path"].rpartition("/")[2]: g for g in server.client.get("/v1/generators").json()["generators"]}
    assert listed["idle_generator.py"]["status"] == "ok"
    assert listed["broken_generator.py"]["status"] == "failed"
    assert "no_such_module" in listed["broken_generator.py"]["traceback"]
    answer = server.client.post("/start_rollout", json={"task_type": "broken", "num_repeat_per_sample": 1})
    assert "no_such_module" in assert_error(answer, 400, "generator_broken", "task_type")["message"]
    write_generator(server.generators, "TASK_TYPE = 'broken'\ndef run_rollout(data): pass\n", "broken_generator.py")
    assert server.start_slime(task_type="broken").view()["task_type"] == "broken"


# --- operations


def test_health_and_readiness(server: ServerProcess) -> None:
    assert server.client.get("/healthz").json() == {"status": "ok"}
    assert server.client.get("/readyz").json() == {
        "ready": True,
        "storage": "ok",
        "retention": "ok",
        "stalled_runs": [],
        "alarms": [],
    }


def test_metrics_count_what_happened(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run()
    samples = [*make_group("a", GOOD), *make_group("b", [1.0] * 4), make_sample(instance_id="c", uid="c")]
    run.write(*samples, samples[0])
    run.write(make_sample(instance_id="c", status="failed", reward=...))
    run.take(num_groups=1)
    run.wait_for_state("running")
    page = server.client.get("/metrics").text
    numbers = {name: float(value) for name, value in re.findall(r"^(forebay_[^#\s]+) (\S+)$", page, re.MULTILINE)}
    expected = {
        'forebay_samples_total{outcome="member"}': 9,
        'forebay_samples_total{outcome="failed"}': 1,
        'forebay_samples_total{outcome="duplicate"}': 1,
        'forebay_groups{state="acked"}': 1,
        'forebay_groups{state="open"}': 1,
        'forebay_groups{state="discarded"}': 1,
        'forebay_groups_discarded_total{reason="invalid"}': 1,
        "forebay_buffered_samples": 2,
        'forebay_runs{state="running"}': 1,
        "forebay_write_seconds_count": 2,
        "forebay_read_seconds_count": 1,
        "forebay_storage_healthy": 1,
        "forebay_journal_quarantined": 0,
    }
    assert {name: numbers[name] for name in expected} == expected
    assert numbers["forebay_sample_bytes_total"] > 9 * 200
    assert 0 < numbers["forebay_buffered_bytes"] < numbers["forebay_sample_bytes_total"]
    assert numbers["forebay_journal_bytes"] > numbers["forebay_sample_bytes_total"]
