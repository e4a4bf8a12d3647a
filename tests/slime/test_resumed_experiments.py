"""Several experiments on one server, of the same task type and group size: which run a list of finished ids leads to.

All number their rows from 0, so that their lists look alike. The input file tells them apart, by what it holds.
"""

import json
from pathlib import Path

import pytest

from tests.conftest import MakeServer
from tests.kit import Json, ServerProcess, SlimeRun, make_group, poll_until

NUM_ROWS = 6
REWARDS = [0.0, 1.0, 0.0, 1.0]


@pytest.fixture(scope="module")
def server(module_servers: MakeServer) -> ServerProcess:
    return module_servers(start_wait_s=60)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A stream of the test's own."""
    return str(request.node.name).removeprefix("test_")[:56]


def write_rows(path: Path, prefix: str) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{prefix} {n}"}) + "\n" for n in range(NUM_ROWS)))
    return str(path)


def train(run: SlimeRun, num_fetches: int) -> list[int]:
    """Let a run make two groups for each fetch and a few more, and fetch; the ids that its trainer then lists."""
    begin = max((group["instance_id"] for group in run.groups()), default=-1) + 1
    for instance_id in range(begin, begin + 2 * num_fetches + 1):
        for sample in make_group(instance_id, REWARDS):
            assert run.send(sample).status_code == 200
    told = [run.fetch(batch_size=2 * len(REWARDS))["data"]["meta_info"] for _ in range(num_fetches)]
    return [instance_id for meta in told for instance_id in meta["finished_groups"]]


@pytest.mark.parametrize("prefix", ["", "named"])
def test_five_experiments_come_back_to_their_own_runs(make_server: MakeServer, tmp_path: Path, prefix: str) -> None:
    """Under the same name, which without one is "": each run stops the one before it."""
    server = make_server(start_wait_s=60)
    runs, lists, inputs = [], [], []
    for number in range(5):
        inputs.append(write_rows(tmp_path / f"{number}.jsonl", f"experiment {number}:"))
        runs.append(server.start_slime(prefix, input_file=inputs[-1]))
        lists.append(train(runs[-1], 1))
    assert lists == [[0, 1]] * 5
    for number in (3, 0, 4, 1, 2):
        resumed = server.start_slime(prefix, input_file=inputs[number], skip_instance_ids=lists[number])
        assert resumed.run_id == runs[number].run_id, number
        rows = resumed.fetch()["data"]["data"]
        assert {row["instance_id"] for row in rows} == {2}, "what it made and did not deliver"


def test_without_a_run_of_that_content_a_new_one_skips_the_list(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    first = server.start_slime(name, input_file=write_rows(tmp_path / "one.jsonl", "one"))
    listed = train(first, 1)
    second = server.start_slime(
        name, input_file=write_rows(tmp_path / "other.jsonl", "other"), skip_instance_ids=listed
    )
    assert second.run_id != first.run_id
    told = server.client.get(f"{second.path}/skip_instance_ids").json()["skip_instance_ids"]
    assert sorted(told) == listed
    assert f"{first.run_id} knows the listed ids, but had another input file" in server.log()


def test_equal_content_under_another_path_and_changed_settings_lead_to_the_run(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    changes: Json = {"sampling_params": {"temperature": 0.7}, "max_tokens": "64", "group_timeout_seconds": 77}
    first = server.start_slime(name, input_file=write_rows(tmp_path / "a.jsonl", "same"))
    listed = train(first, 1)
    moved = write_rows(tmp_path / "b.jsonl", "same")
    again = server.start_slime(f"{name}-2", input_file=moved, skip_instance_ids=listed, **changes)
    assert again.run_id == first.run_id
    assert again.view()["settings"]["group_timeout_seconds"] == 77


def test_what_the_file_held_at_the_start_counts(server: ServerProcess, tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.jsonl"
    first = server.start_slime(name, input_file=write_rows(path, "before"))
    listed = train(first, 1)
    server.kill9()
    server.restart()
    changed = server.start_slime(name, input_file=write_rows(path, "behind"), skip_instance_ids=listed)
    assert changed.run_id != first.run_id, "of the same size, and under the same path"
    copy = write_rows(tmp_path / "copy.jsonl", "before")
    assert server.start_slime(name, input_file=copy, skip_instance_ids=listed).run_id == first.run_id


def test_of_several_the_one_that_goes_least_beyond_the_list(server: ServerProcess, tmp_path: Path, name: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", "all")
    runs = [server.start_slime(name, input_file=rows, num_epoch="1")]
    lists = [train(runs[0], 2)]
    for number in (1, 3):
        runs.append(server.start_slime(name, input_file=rows, num_epoch="1"))
        lists.append(train(runs[-1], number))
    assert list(map(len, lists)) == [4, 2, 6]
    for number in (1, 0, 2):
        resumed = server.start_slime(name, input_file=rows, num_epoch="1", skip_instance_ids=lists[number])
        assert resumed.run_id == runs[number].run_id


def test_of_equals_the_one_started_alike_and_then_the_newest(server: ServerProcess, tmp_path: Path, name: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", "all")
    runs = []
    for temperature in (0.5, 1.0, 1.0):
        runs.append(server.start_slime(name, input_file=rows, sampling_params={"temperature": temperature}))
        assert train(runs[-1], 1) == [0, 1]
    for temperature, run in ((0.5, runs[0]), (1.0, runs[2]), (0.7, runs[2])):
        sampling = {"temperature": temperature}
        resumed = server.start_slime(name, input_file=rows, sampling_params=sampling, skip_instance_ids=[0, 1])
        assert resumed.run_id == run.run_id, temperature


def test_a_run_that_names_itself_decides_whatever_its_file_held(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    first = server.start_slime(name, input_file=write_rows(tmp_path / "one.jsonl", "one"))
    listed = train(first, 1)
    other = write_rows(tmp_path / "other.jsonl", "other")
    assert (
        server.start_slime(name, input_file=other, skip_instance_ids=listed, run_id=first.run_id).run_id == first.run_id
    )


def test_without_input_files_the_list_alone_leads_to_the_run(server: ServerProcess, tmp_path: Path, name: str) -> None:
    first = server.start_slime(name)
    listed = train(first, 1)
    rows = write_rows(tmp_path / "rows.jsonl", "any")
    assert server.start_slime(name, input_file=rows, skip_instance_ids=listed).run_id != first.run_id
    assert server.start_slime(name, skip_instance_ids=listed).run_id == first.run_id


def test_a_start_does_not_wait_for_the_reading_of_a_large_file(make_server: MakeServer, tmp_path: Path) -> None:
    """What the file held is known a little later, also when it has been changed since."""
    server = make_server(start_wait_s=0)
    first = server.start_slime(input_file=write_rows(tmp_path / "one.jsonl", "one"))
    listed = train(first, 1)
    first.wait_for_state("running")
    poll_until(lambda: first.view()["input_sha256"])
    write_rows(tmp_path / "one.jsonl", "another")
    copy = write_rows(tmp_path / "copy.jsonl", "one")
    assert server.start_slime(input_file=copy, skip_instance_ids=listed).run_id == first.run_id
