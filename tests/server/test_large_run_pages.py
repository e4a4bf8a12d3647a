"""What the page shows of a run with ten thousand groups: all counts, each batch, and any group that is asked for."""

import json

import pytest

from forebay.core.ids import group_id
from tests.conftest import MakeServer
from tests.kit import Json
from tests.large_run import GROUP_SIZE, GROUPS_PER_BATCH, LargeRun

NUM_GROUPS = 10_000
COUNTS = {"open": 100, "ready": 1_000, "leased": 0, "acked": 8_500, "discarded": 500}


@pytest.fixture(scope="module")
def large(module_servers: MakeServer) -> LargeRun:
    return LargeRun(module_servers(), NUM_GROUPS).fill()


def replies(large: LargeRun, paths: list[str]) -> list[Json]:
    return [large.run.client.get(path).raise_for_status().json() for path in paths]


def test_the_overview_and_the_page_of_the_run_count_all_of_it(large: LargeRun) -> None:
    history, listed, whole, overview = replies(large, large.run_page())
    for view in (history["run"], whole, overview["runs"][0]):
        assert view["groups"] == COUNTS
        assert view["discarded"] == {"invalid": 500}
        assert view["samples"]["member"] == NUM_GROUPS * GROUP_SIZE + 100
        assert view["rewards"]["num"] == NUM_GROUPS * GROUP_SIZE + 100
    still_open = {large.named(NUM_GROUPS + number) for number in range(100)}
    assert {group["group_id"] for group in overview["open_groups"]} <= still_open
    assert len(overview["open_groups"]) == len(history["open_groups"]) == 20
    discarded = {large.named(number) for number in range(NUM_GROUPS) if large.is_discarded(number)}
    assert len({group["group_id"] for group in listed["groups"]} & discarded) == len(listed["groups"]) == 100
    assert {len(group["samples"]) for group in listed["groups"]} == {GROUP_SIZE}


def test_the_history_has_every_batch_once_up_to_the_last(large: LargeRun) -> None:
    [newest] = replies(large, [f"{large.run.path}/history"])
    assert newest["last"] == large.num_batches == 85
    assert [each["number"] for each in newest["batches"]] == list(range(66, 86))
    older = replies(large, [f"{large.run.path}/history?after={after}&limit=20" for after in range(0, 80, 20)])
    batches = [batch for reply in older for batch in reply["batches"]] + newest["batches"][15:]
    assert [each["number"] for each in batches] == list(range(1, 86))
    assert {each["num_rows"] for each in batches} == {GROUPS_PER_BATCH * GROUP_SIZE}
    assert {each["rewards"]["mean"] for each in batches} == {0.5}
    assert sum(each["discarded"].get("invalid", 0) for each in batches) == large.num_discarded


@pytest.mark.parametrize("state", list(COUNTS))
def test_the_groups_of_a_state_are_all_found_page_by_page(large: LargeRun, state: str) -> None:
    found: list[str] = []
    for _ in range(COUNTS[state] // 1_000 + 1):
        page = large.run.groups(state=state, after=found[-1] if found else "")
        assert {group["state"] for group in page} <= {state}
        found += [group["group_id"] for group in page]
    assert len(set(found)) == len(found) == COUNTS[state]


def test_a_group_that_left_memory_long_ago_is_shown_with_its_other_epoch(large: LargeRun) -> None:
    *views, body = large.group_page()
    group, epochs, run = replies(large, views[:3])
    assert (group["group_id"], group["state"], group["num_samples"]) == (group_id("row-0", 0), "acked", GROUP_SIZE)
    assert [sample["reward"] for sample in group["samples"]] == [0.0, 1.0] * 5
    assert [(each["epoch"], each["step"]) for each in epochs["groups"]] == [(0, 0), (1, 50), (2, None)]
    assert run["groups"] == COUNTS
    assert large.run.client.get(body).json() == large.sample(0, GROUP_SIZE - 1)


def test_a_rollout_is_shown_with_its_annotation(large: LargeRun) -> None:
    group, notes, _, body = (large.run.client.get(path) for path in large.rollout_page())
    assert large.uid in [sample["uid"] for sample in group.json()["samples"]]
    [note] = [json.loads(line) for line in notes.text.splitlines()]
    assert (note["uid"], note["group_id"], note["values"]) == (large.uid, large.group_id, {"loss": 0.5})
    assert body.json() == large.sample(0, 1)
