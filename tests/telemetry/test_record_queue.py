"""The queue before the file: bounded, and what is lost is counted."""

import json

from forebay.telemetry.tracing.records import Open, RolloutSummary, Span
from forebay.telemetry.tracing.trace_file import CAPACITY, RecordQueue


def make_span(name: str = "engine") -> Span:
    return Span(name=name, t=1, d=1, id="a")


def make_summary(uid: str = "uid") -> RolloutSummary:
    return RolloutSummary(t=1, d=1, id="a", uid=uid, group="group", instance=1)


def drained(queue: RecordQueue) -> list[dict[str, object]]:
    found = []
    while lines := queue.take_lines(5):
        found += [json.loads(line) for line in lines.splitlines()]
    return found


def test_it_holds_65536_records() -> None:
    assert CAPACITY == 65_536


def test_on_overflow_spans_go_before_summaries_and_are_counted() -> None:
    queue = RecordQueue(lambda: None, capacity=10)
    for number in range(8):
        queue.put(make_span(f"span-{number}"))
    for number in range(4):
        queue.put(make_summary(f"uid-{number}"))
    queue.put(make_span("late"))
    queue.put(Open(name="late", t=1, id="b"))
    records = drained(queue)
    assert [record["name"] for record in records if record["kind"] == "span"] == [f"span-{n}" for n in range(2, 8)]
    assert [record["uid"] for record in records if record["kind"] == "rollout"] == [f"uid-{n}" for n in range(4)]
    assert [record for record in records if record["kind"] == "dropped"] == [
        {"kind": "dropped", "t": 5, "spans": 4, "why": "queue"}
    ]


def test_with_nothing_but_summaries_the_last_ones_are_lost_and_counted() -> None:
    queue = RecordQueue(lambda: None, capacity=3)
    for number in range(5):
        queue.put(make_summary(f"uid-{number}"))
    records = drained(queue)
    assert [record["uid"] for record in records if record["kind"] == "rollout"] == ["uid-0", "uid-1", "uid-2"]
    assert records[-1]["summaries"] == 2


def test_when_much_is_waiting_somebody_is_told_once() -> None:
    calls: list[int] = []
    queue = RecordQueue(lambda: calls.append(len(queue)), capacity=100)
    for _ in range(60):
        queue.put(make_span())
    assert calls == [26]


def test_a_record_that_cannot_be_written_costs_itself_alone() -> None:
    queue = RecordQueue(lambda: None)
    queue.put(make_span())
    queue.put(Span(name="bad", t=1, d=1, id="a", at={"value": object()}))
    queue.put(make_span())
    records = drained(queue)
    assert [record.get("name") for record in records if record["kind"] == "span"] == ["engine", "engine"]
    assert records[-1]["spans"] == 1


def test_a_line_longer_than_readers_take_is_lost_and_counted() -> None:
    queue = RecordQueue(lambda: None)
    queue.put(make_summary("x" * (1 << 20)))
    queue.put(make_summary("uid"))
    kept, dropped = drained(queue)
    assert (kept["uid"], dropped["summaries"]) == ("uid", 1)
