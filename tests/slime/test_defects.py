"""The defects of slime's rollout buffer, each shown absent.

Those that another test file shows are listed in ``SHOWN_ELSEWHERE``, which is checked to name tests that exist.
"""

import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import (
    TIME_LIMIT_S,
    ServerProcess,
    SlimeRun,
    assert_error,
    make_group,
    make_sample,
    write_generator,
)

GOOD = [0.0, 1.0, 0.0, 1.0]
TESTS = Path(__file__).parent.parent
SHOWN_ELSEWHERE = [
    (
        "a late item re-creates a closed group",
        "server/test_deadlines.py",
        "a_late_sample_is_stored_and_reopens_nothing",
    ),
    (
        "resume regenerates everything",
        "slime/test_resume.py",
        "killed_in_the_second_of_three_epochs_only_what_is_missing",
    ),
    (
        "a worker's exception means run() never returns",
        "generators/test_base.py",
        "a_rollout_that_raises_is_tried_again",
    ),
    (
        "a write is dropped after two tries",
        "generators/test_base_buffer.py",
        "a_busy_buffer_is_asked_again_at_every_step",
    ),
    ("300 s sleep per epoch", "generators/test_base.py", "every_slot_of_every_group_arrives"),
    (
        "abort joins text of several policies",
        "generators/test_partial_turns.py",
        "an_aborted_turn_goes_on_from_its_tokens",
    ),
    (
        "num_repeats multiplies num_epoch silently",
        "generators/test_base.py",
        "num_repeats_multiplies_the_epochs_and_says_so",
    ),
    ("a file is executed again at each start", "generators/test_discovery.py", "an_unchanged_file_is_inspected_once"),
    (
        "its classes cannot be pickled",
        "generators/test_runtime.py",
        "classes_of_the_module_pickle_under_every_start_method",
    ),
    ("{} returns everything", "server/test_reads.py", "a_read_without_a_size_is_capped_by_groups_bytes_and_instance"),
    (
        "it binds 0.0.0.0 without authentication",
        "server/test_access.py",
        "other_than_loopback_is_refused_without_a_token",
    ),
    ("it reads any input_file", "server/test_access.py", "an_input_file_is_read_only_below_the_allowed_folders"),
]


@pytest.mark.parametrize(("defect", "file", "test"), SHOWN_ELSEWHERE)
def test_what_is_shown_elsewhere_is_there(defect: str, file: str, test: str) -> None:
    assert re.search(rf"^(async )?def test_{test}", (TESTS / file).read_text(), re.MULTILINE), defect


@pytest.fixture(scope="module")
def patient_server(module_servers: MakeServer) -> ServerProcess:
    """For tests with generator files of their own: a start waits until they are known."""
    return module_servers(start_wait_s=60)


@pytest.fixture
def slime(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[SlimeRun]:
    run = server.start_slime(request.node.name[:60])
    yield run
    run.stop()


# --- deleted before the batch size is checked; lost groups


def test_a_group_stays_when_the_batch_size_is_not_reached(slime: SlimeRun) -> None:
    slime.write(*make_group("only", GOOD))
    for _ in range(2):
        refused = slime.fetch(batch_size=100)
        assert (refused["success"], refused["data"]["meta_info"]["finished_groups"]) == (False, [])
    taken = slime.fetch()
    assert [row["instance_id"] for row in taken["data"]["data"]] == ["only"] * 4
    assert taken["data"]["meta_info"]["finished_groups"] == ["only"]


def test_of_ten_timed_out_groups_of_12_out_of_16_ten_are_delivered(server: ServerProcess) -> None:
    run = server.start_slime("salvage", group_size=16, group_timeout_seconds=1)
    run.wait_for_state("running")
    run.write(*[sample for number in range(10) for sample in make_group(number, [n % 2 for n in range(12)])])
    run.closed(10)
    rows, finished = [], []
    while (answer := run.fetch(batch_size=1))["success"]:
        rows += answer["data"]["data"]
        finished += answer["data"]["meta_info"]["finished_groups"]
    assert [row["instance_id"] for row in rows] == [number for number in range(10) for _ in range(16)]
    assert finished == list(range(10))
    run.stop()


# --- the simplified version: nothing finished is told, nothing times out, one empty answer strands a group


BOOL_VALIDITY = """
import threading
TASK_TYPE = "simplified"
def is_valid_group(group, group_size, task_type):
    return len(group[1]) >= group_size
def transform_group(group, task_type):
    items = group[1]
    return group[0], [items[n % len(items)] for n in range(4)] if items[0]["instance_id"] != "empty" else []
def run_rollout(data):
    threading.Event().wait()
"""


def test_the_simplified_contract_has_finished_groups_and_time_outs_and_strands_nothing(
    patient_server: ServerProcess,
) -> None:
    write_generator(patient_server.generators, BOOL_VALIDITY, "simplified_generator.py")
    run = patient_server.start_slime("simplified", "simplified", group_timeout_seconds=1)
    run.wait_for_state("running")
    run.write(*make_group("empty", GOOD), *make_group("whole", GOOD), *make_group("short", GOOD[:3]))
    run.write(make_sample(instance_id="alone"))
    rows, finished = _read_all(run)
    assert sorted(rows) == ["short"] * 4 + ["whole"] * 4
    assert set(finished) >= {"whole", "short"}
    assert set(finished) <= {"whole", "short", "empty", "alone"}
    assert {group["instance_id"]: group["reason"] for group in run.groups(state="discarded")} == {
        "empty": "incomplete",
        "alone": "timed_out",
    }
    assert {group["instance_id"] for group in run.groups(state="acked")} == {"whole", "short"}


def _read_all(run: SlimeRun) -> tuple[list[str], list[str]]:
    """The instances of all rows, and the finished groups, once every group is closed."""
    run.closed(4)
    rows: list[str] = []
    finished: list[str] = []
    while (answer := run.fetch())["success"]:
        rows += [row["instance_id"] for row in answer["data"]["data"]]
        finished += answer["data"]["meta_info"]["finished_groups"]
    return rows, finished


# --- one uid several times


def test_one_uid_three_times_does_not_fill_a_group_of_four(slime: SlimeRun) -> None:
    for sample in (*[make_sample(uid="same")] * 3, make_sample(uid="other")):
        assert slime.send(sample).status_code == 200
    assert slime.fetch()["success"] is False
    assert [group["num_samples"] for group in slime.groups()] == [2]


# --- items that break later reads


def test_an_item_without_reward_or_content_does_not_break_later_reads(slime: SlimeRun) -> None:
    odd = [make_sample(instance_id="odd", reward=...), make_sample(instance_id="odd", messages=[{"content": None}])]
    for sample in (*odd, *make_group("odd", [0.0, 0.5]), *make_group("good", GOOD)):
        assert slime.send(sample).status_code == 200
    rows = slime.fetch()["data"]["data"]
    assert [row["instance_id"] for row in rows] == ["odd"] * 4 + ["good"] * 4


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([2.0, 3.0, -1.0, 7.0], "filtered"),
        ([0.0, 7.0, 5.0, 6.0], "filtered"),
        ([0.5, 0.5, 0.5, 0.5], "invalid"),
        ([0.0, 0.0, 0.0, 0.0], "invalid"),
    ],
)
def test_a_group_of_no_use_is_discarded_and_the_next_one_delivered(
    server: ServerProcess, rewards: list[float], reason: str
) -> None:
    run = server.start_slime("useless")
    run.write(*make_group("bad", rewards), *make_group("good", GOOD))
    answer = run.fetch()
    assert [row["instance_id"] for row in answer["data"]["data"]] == ["good"] * 4
    assert sorted(answer["data"]["meta_info"]["finished_groups"]) == ["bad", "good"]
    assert [group["reason"] for group in run.groups(state="discarded")] == [reason]
    run.stop()


def test_no_valid_reward_and_equal_rewards_divide_by_nothing(server: ServerProcess) -> None:
    lenient = {"min_valid_item_size_ratio": 0, "min_timeout_group_size_ratio": 0, "group_timeout_seconds": 1}
    run = server.start_slime("arithmetic", **lenient)
    run.wait_for_state("running")
    run.write(*make_group("one", [0.7]), *make_group("equal", [0.7, 0.7]), *make_group("zero", [0.0, 0.0, 0.0]))
    run.write(*make_group("outside", [3.0, 4.0]))
    run.closed(4)
    rows = run.fetch()["data"]["data"]
    assert {(row["instance_id"], row["reward"]) for row in rows} == {("one", 0.0), ("equal", 0.0), ("zero", 0.0)}
    assert [group["instance_id"] for group in run.groups(state="discarded")] == ["outside"]
    run.stop()


def test_fewer_than_half_kept_are_padded_in_turn(server: ServerProcess) -> None:
    run = server.start_slime("padded", group_size=8, min_valid_item_size_ratio=0.1)
    run.write(*make_group("g", [0.0, 1.0, 0.5, 9.0, 9.0, 9.0, 9.0, 9.0]))
    rows = run.fetch()["data"]["data"]
    assert [row["uid"] for row in rows] == [f"g/{n}" for n in (0, 1, 2, 0, 1, 2, 0, 1)]
    assert sum(row["reward"] for row in rows) == pytest.approx(0.0, abs=1e-9)
    spread = (1 / 6) ** 0.5 + 1e-8
    assert rows[1]["reward"] == pytest.approx(0.5 / spread * 8 / 3 / 3, abs=1e-9)
    run.stop()


def test_an_overfull_group_ships_exactly_its_rows(patient_server: ServerProcess) -> None:
    doubling = BOOL_VALIDITY.replace("for n in range(4)", "for n in range(7)").replace('"simplified"', '"doubling"')
    write_generator(patient_server.generators, doubling, "doubling_generator.py")
    run = patient_server.start_slime("doubling", "doubling")
    run.write(*make_group("g", GOOD), *[s | {"epoch": 0, "uid": "more/" + s["uid"]} for s in make_group("g", GOOD)])
    assert len(run.fetch()["data"]["data"]) == 4
    assert run.fetch()["success"] is False
    assert run.view()["samples"]["rows_cut"] == 3
    assert run.view()["samples"]["surplus"] == 4


# --- blocking reads and writes that scan


def test_a_waiting_read_does_not_stop_the_server(slime: SlimeRun) -> None:
    with ThreadPoolExecutor(1) as pool:
        path = f"{slime.server.url}{slime.prefix}/buffer/read"
        body = {"batch_size": 4, "timeout": TIME_LIMIT_S, "wait": True}
        waiting = pool.submit(httpx.post, path, json=body, timeout=2 * TIME_LIMIT_S)
        for sample in make_group("g", GOOD):
            assert slime.client.get("/healthz").status_code == 200
            assert not waiting.done()
            slime.client.post(f"{slime.prefix}/buffer/write", json=sample)
        assert len(waiting.result(TIME_LIMIT_S).json()["data"]["data"]) == 4


def test_a_write_costs_the_same_with_2000_open_groups(slime: SlimeRun) -> None:
    few = slime.server.start_slime("few-open-groups")
    slime.write(*[make_sample(instance_id=number) for number in range(2_000)])
    assert slime.view()["groups"]["open"] >= 2_000
    # In turn, and the first quartile of each: others use the machine too.
    pairs = [(_write_s(few, number), _write_s(slime, number)) for number in range(60)]
    few_s, many_s = (statistics.quantiles(each)[0] for each in zip(*pairs, strict=True))
    assert many_s < 3 * few_s + 0.001
    few.stop()


def _write_s(run: SlimeRun, number: int) -> float:
    sample = make_sample(instance_id=f"timed {number % 2}")
    began_s = time.perf_counter()
    run.send(sample)
    return time.perf_counter() - began_s


# --- starts


def test_an_unknown_task_type_is_refused_and_leaves_nothing_to_poll(make_server: MakeServer) -> None:
    server = make_server()
    answer = server.client.post("/start_rollout", json={"task_type": "mistyped", "num_repeat_per_sample": "8"})
    assert_error(answer, 400, "unknown_task_type", "task_type")
    assert_error(server.client.post("/get_rollout_data", json={}), 410, "no_run")


def test_a_second_start_ends_the_first_generator_and_shares_no_buffer(server: ServerProcess) -> None:
    first = server.start_slime("twice")
    first.wait_for_state("running")
    first.send(make_sample(instance_id="old"))
    second = server.start_slime("twice", num_epoch="7")
    assert first.view()["state"] == "stopped"
    second.send(make_sample(instance_id="new"))
    assert [[g["instance_id"] for g in run.groups()] for run in (first, second)] == [["old"], ["new"]]
    second.stop()


def test_two_files_with_one_task_type_are_refused_and_both_named(patient_server: ServerProcess) -> None:
    source = (patient_server.generators / "idle_generator.py").read_text()
    write_generator(patient_server.generators, source + "\n# a copy", "copied_generator.py")
    answer = patient_server.client.post("/start_rollout", json={"task_type": "idle", "num_repeat_per_sample": "8"})
    message = assert_error(answer, 400, "generator_broken", "task_type")["message"]
    assert "idle_generator.py" in message
    assert "copied_generator.py" in message


def test_a_failing_read_never_gives_a_page_for_debugging(server: ServerProcess) -> None:
    answer = server.client.get("/v1/nothing")
    assert answer.headers["content-type"] == "application/json"
    assert "Traceback" not in answer.text
