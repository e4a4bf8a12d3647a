"""The protocol without a server: what is said when, and what outlives a call that is broken off."""

from typing import Any

import msgspec
import pytest

from forebay import client
from forebay.client.calls.flow import ENDLESS_S, TRANSIENT, Call, Flow, Lost, Pause, ServerReply, answered
from forebay.client.calls.transport import Transport
from forebay.client.errors import ClientClosed, error_of, make_error
from forebay.client.sample_writer.outbox import Outbox, WriteLimits
from forebay.client.trainer.leases import UncheckpointedLeases
from forebay.client.trainer.requests import Reading
from forebay.core import errors
from forebay.core.backoff import Backoff
from forebay.core.errors import ForebayError
from tests.kit import make_sample

LOST = Lost("ReadError")
BATCH = b'{"batch_id": "b", "data": [], "meta_info": {}, "lease_s": 60, "group_sizes": [], "group_ids": []}'
EMPTY = ServerReply(200, {}, b'{"batch_id": null, "data": [], "meta_info": {}}')


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def asked(call: Any) -> dict[str, Any]:
    assert isinstance(call, Call)
    assert call.body is not None
    body: dict[str, Any] = msgspec.json.decode(call.body)
    return body


def reading() -> Reading:
    made = Reading(retry_for_s=60)
    made.run_id = "run-1"
    return made


def test_a_request_keeps_its_id_until_it_is_answered() -> None:
    flow = reading().read(1, lease_s=60, wait_s=0)
    first = flow.send(None)
    assert isinstance(flow.send(LOST), Pause)
    again = flow.send(None)
    assert asked(first) == asked(again)
    with pytest.raises(StopIteration) as end:
        flow.send(EMPTY)
    assert end.value.value is None


def test_the_next_read_asks_for_what_a_broken_off_one_may_have_leased() -> None:
    trainer = reading()
    broken_off = trainer.read(1, lease_s=60, wait_s=None)
    first = asked(broken_off.send(None))
    broken_off.close()
    repeated, another = trainer.read(1, lease_s=60, wait_s=None), trainer.read(1, lease_s=60, wait_s=None)
    assert asked(repeated.send(None))["request_id"] == first["request_id"]
    assert asked(another.send(None))["request_id"] != first["request_id"]


def test_two_reads_that_are_broken_off_are_both_asked_again() -> None:
    trainer = reading()
    reads = [trainer.read(1, lease_s=60, wait_s=None) for _ in range(4)]
    ids = [asked(read.send(None))["request_id"] for read in reads[:2]]
    for read in reads[:2]:
        read.close()
    assert [asked(read.send(None))["request_id"] for read in reads[2:]] == ids


def test_an_answer_that_comes_after_the_end_is_not_taken_but_given_back() -> None:
    trainer = reading()
    late = trainer.read(1, lease_s=60, wait_s=None)
    request_id = asked(late.send(None))["request_id"]
    trainer.reads.end()
    with pytest.raises(ClientClosed):
        late.send(ServerReply(200, {}, BATCH))
    assert trainer.leases.all_ids == []
    leaving = trainer.leave()
    listing = [{"batch_id": "b", "request_id": request_id}, {"batch_id": "another's", "request_id": None}]
    paths = [
        leaving.send(None).path,
        leaving.send(ServerReply(200, {}, msgspec.json.encode({"batches": listing}))).path,
    ]
    assert paths == ["v1/runs/run-1/batches?state=leased", "v1/runs/run-1/batches/b/release"]
    leaving.send(ServerReply(200, {}, b"{}"))
    with pytest.raises(StopIteration):
        leaving.send(ServerReply(200, {}, b'{"batches": []}'))


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504, 507])
def test_a_busy_server_is_asked_again_when_it_says(status: int) -> None:
    flow: Flow[ServerReply] = answered(Call("GET", "x"), retry_for_s=60)
    flow.send(None)
    pause = flow.send(ServerReply(status, {"retry-after": "7"}, b""))
    assert isinstance(pause, Pause)
    assert 7 <= pause.seconds <= 7.7


@pytest.mark.parametrize("status", [200, 400, 404, 409, 410, 422, 500])
def test_other_answers_are_final(status: int) -> None:
    flow: Flow[ServerReply] = answered(Call("GET", "x"), retry_for_s=60)
    flow.send(None)
    with pytest.raises(StopIteration):
        flow.send(ServerReply(status, {}, b""))


def test_pauses_grow_and_differ() -> None:
    pauses = [Backoff(first_s=1.0, max_s=8.0) for _ in range(50)]
    first, *_, last = [[each.next_s() for each in pauses] for _ in range(6)]
    assert all(0.5 <= pause_s <= 1.0 for pause_s in first)
    assert all(4.0 <= pause_s <= 8.0 for pause_s in last)
    assert len(set(first)) > 1


def test_leases_are_due_at_a_third_of_their_time() -> None:
    clock = Clock()
    leases = UncheckpointedLeases(clock)
    leases.add("a", 60.0)
    leases.add("b", 600.0)
    assert (leases.pause_s, leases.due()) == (20.0, [])
    clock.now_s = 20.0
    assert leases.due() == [("a", 60.0)]
    leases.extended("a", is_done=False)
    assert 0 < leases.pause_s < 10.0
    leases.extended("a", is_done=True)
    assert leases.pause_s == 20.0
    leases.drop(["a"])
    assert leases.pause_s == 180.0


def test_a_lease_that_is_being_ended_cannot_be_lost() -> None:
    leases = UncheckpointedLeases(Clock())
    leases.add("a", 60.0)
    with leases.busy(["a"]):
        leases.lose("a", make_error("lease_lost", "gone"))
    leases.check()
    assert leases.all_ids == ["a"]
    leases.lose("a", make_error("lease_lost", "gone"))
    with pytest.raises(errors.LeaseLost, match="gone"):
        leases.check()
    leases.check()


def test_a_batch_is_due_by_number_bytes_or_age() -> None:
    clock = Clock()
    outbox = Outbox(WriteLimits(max_samples=2, max_bytes=10, max_age_s=5.0), clock)
    outbox.put(make_sample(), b"123")
    assert outbox.pause_s == 5.0
    clock.now_s = 3.0
    assert outbox.pause_s == 2.0
    outbox.put(make_sample(), b"456")
    assert outbox.pause_s == 0.0
    assert [sent.body for sent in outbox.take()] == [b"123", b"456"]
    outbox.put(make_sample(), b"12345678901")
    assert outbox.pause_s == 0.0


def test_the_public_names_are_sorted_and_told_of() -> None:
    assert sorted(client.__all__) == client.__all__
    assert set(client.__all__) <= set(dir(client))
    assert [name for name in client.__all__ if not getattr(client, name).__doc__] == []


def all_kinds(base: type[ForebayError] = ForebayError) -> list[type[ForebayError]]:
    return [base, *(kind for each in base.__subclasses__() for kind in all_kinds(each))]


@pytest.mark.parametrize("kind", [kind for kind in all_kinds() if kind.__module__ == errors.__name__])
def test_what_the_server_says_is_raised_as_what_it_is(kind: type[ForebayError]) -> None:
    told = {"error": {"code": kind.code, "message": "so it is", "hint": "do this", "field": "there"}}
    error = error_of(kind.status, msgspec.json.encode(told), "GET x", retry_after_s=2.0)
    assert type(error) is kind
    assert (str(error), error.hint, error.field) == ("so it is", "do this", "there")
    assert vars(error)["status_code"] == kind.status
    assert vars(error)["retry_after_s"] == 2.0


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "text"}', b'{"detail": "x"}'])
def test_an_answer_that_is_not_forebays_says_so(body: bytes) -> None:
    error = error_of(404, body, "GET x")
    assert "GET x is not from a Forebay server (status 404)" in str(error)
    assert "address" in error.hint


def test_a_call_may_be_asked_without_end_and_for_statuses_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    flow: Flow[ServerReply] = answered(Call("GET", "x"), ENDLESS_S, TRANSIENT | {500})
    flow.send(None)
    for answer in [Lost("ReadError"), ServerReply(500, {}, b"")] * 5:
        assert isinstance(flow.send(answer), Pause)
        assert isinstance(flow.send(None), Call)
    assert caplog.messages == ["GET x: ReadError; retrying until the server replies"]
    with pytest.raises(StopIteration):
        flow.send(ServerReply(404, {}, b""))


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:0", "http://[::1", "http://a\nb", "127.0.0.1:8889"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(errors.InvalidInput, match="is not a server's address"):
        Transport(url)
