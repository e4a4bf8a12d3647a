"""Samples from elsewhere: in batches, until each is acknowledged, told when one is refused."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from forebay.client import (
    AsyncSampleWriter,
    Limits,
    Rows,
    SamplesRefused,
    SampleWriter,
    ServerUnreachable,
    WriterClosed,
)
from forebay.client.sample_writer.protocol import Writing
from forebay.core import parts
from forebay.core.errors import InvalidInput, RunNotFound
from tests.client.faulty_proxy import FaultyProxy
from tests.kit import TIME_LIMIT_S, NativeRun, ServerProcess, make_group, make_sample, poll_until, write_generator

NEVER = Limits(max_age_s=3_600)
TELLS_ADDRESS = """
import pathlib, threading
TASK_TYPE = "tells"
def run_rollout(data):
    pathlib.Path(data["tell"]).write_text(data["remote_buffer_url"])
    threading.Event().wait()
"""


def uids(run: NativeRun, **query: Any) -> list[str]:
    return [sample["uid"] for group in run.groups(**query) for sample in run.group(group["group_id"])["samples"]]


def test_what_was_written_is_there_when_the_block_is_left(run: NativeRun) -> None:
    group = make_group("a", [0.0, 1.0, 0.5, 0.25])
    with SampleWriter(run.server.url, run.run_id) as writer:
        for sample in group:
            writer.write(sample)
    assert writer.num_acknowledged == 4
    assert uids(run) == [sample["uid"] for sample in group]


def test_samples_go_together_by_number_size_and_age(run: NativeRun, proxy: FaultyProxy) -> None:
    with SampleWriter(proxy.url, run.run_id, limits=Limits(max_samples=3, max_age_s=3_600)) as writer:
        for sample in make_group("a", [0.0, 1.0, 0.5]):
            writer.write(sample)
        poll_until(lambda: writer.num_acknowledged == 3)
    big = {"messages": [{"role": "user", "content": "x" * 50_000}]}
    with SampleWriter(proxy.url, run.run_id, limits=Limits(max_bytes=120_000, max_age_s=3_600)) as writer:
        for sample in make_group("b", [0.0, 1.0, 0.5], **big):
            writer.write(sample)
        poll_until(lambda: writer.num_acknowledged >= 2)
    with SampleWriter(proxy.url, run.run_id, limits=Limits(max_age_s=0.01)) as writer:
        writer.write(make_sample())
        poll_until(lambda: writer.num_acknowledged == 1)
    assert [len(seen.body.splitlines()) for seen in proxy.requests("samples")] == [3, 2, 1, 1]


def test_samples_that_share_a_part_go_together_up_to_a_few_times_the_size(run: NativeRun, proxy: FaultyProxy) -> None:
    shared, tokens = b"s" * 20_000, {"tokens": [1], "logprobs": [0.0], "loss_mask": [1]}
    with SampleWriter(proxy.url, run.run_id, limits=Limits(max_bytes=100_000, max_age_s=3_600)) as writer:
        for number in range(20):
            own = bytes([number]) * 50_000
            writer.write(make_sample(uid=f"{number}", instance_id="a", parts=[shared, own], **tokens))
    bodies = [seen.body for seen in proxy.requests("samples")]
    assert max(map(len, bodies)) < 500_000
    assert sum(body.count(shared) for body in bodies) == len(bodies) < 20
    # Parts that waiting samples share count, and take memory, once.
    waiting = Writing("samples", Limits(max_waiting_bytes=500_000))
    for _ in range(20):
        waiting.outbox.put(*waiting.encoded(make_sample(parts=[bytes(100_000)])))
    assert waiting.outbox.has_room
    assert len({id(part) for queued in waiting.outbox.take() for part in queued.parts.values()}) == 1


@pytest.mark.parametrize("limits", [{"max_samples": 0}, {"max_waiting": 0}, {"max_waiting_bytes": -1}])
def test_limits_that_let_nothing_through_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="must be at least 1") as refused:
        Limits(**limits)
    assert refused.value.field == next(iter(limits))


@pytest.mark.parametrize("max_age_s", [-1.0, float("nan")])
def test_an_age_is_no_less_than_nothing(max_age_s: float) -> None:
    with pytest.raises(InvalidInput, match="must be at least 0"):
        Limits(max_age_s=max_age_s)


def test_what_cannot_be_encoded_is_not_taken_and_the_others_go_on(run: NativeRun) -> None:
    with SampleWriter(run.server.url, run.run_id) as writer:
        for odd in (object(), "\ud800"):
            with pytest.raises(TypeError):
                writer.write(make_sample(uid="odd", text=odd))
        writer.write(make_sample(uid="u"))
    assert uids(run) == ["u"]


def test_flush_waits_for_the_acknowledgement(run: NativeRun) -> None:
    with SampleWriter(run.server.url, run.run_id, limits=NEVER) as writer:
        writer.write(make_sample(uid="u"))
        assert writer.num_acknowledged == 0
        writer.flush()
        assert uids(run) == ["u"]


@pytest.mark.parametrize("kind", ["lose request", "lose reply", "busy", "full"])
def test_whatever_is_lost_each_sample_is_stored_once(run: NativeRun, proxy: FaultyProxy, kind: Any) -> None:
    proxy.plan(kind, kind, path="samples")
    group = make_group("a", [0.0, 1.0, 0.5, 0.25])
    with SampleWriter(proxy.url, run.run_id) as writer:
        for sample in group:
            writer.write(sample)
    assert proxy.is_calm
    assert uids(run) == [sample["uid"] for sample in group]


def test_a_sample_without_uid_gets_one_before_it_is_first_sent(run: NativeRun, proxy: FaultyProxy) -> None:
    proxy.plan("lose reply", path="samples")
    with SampleWriter(proxy.url, run.run_id) as writer:
        writer.write(make_sample(uid=...))
    assert len(uids(run)) == 1


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_bodies_go_compressed(run: NativeRun, proxy: FaultyProxy, encoding: Any) -> None:
    sample = make_sample(messages=[{"role": "user", "content": "words " * 10_000}])
    with SampleWriter(proxy.url, run.run_id, encoding=encoding) as writer:
        writer.write(sample)
    seen = proxy.requests("samples")[0]
    assert seen.headers["Content-Encoding"] == encoding
    assert len(seen.body) < 5_000
    stored = run.client.get(f"{run.path}/groups/{run.groups()[0]['group_id']}?bodies=true").json()["samples"][0]
    assert stored["body"]["messages"] == sample["messages"]


def test_token_arrays_go_as_numbers_beside_samples_without(run: NativeRun, proxy: FaultyProxy) -> None:
    tokens = list(range(1_000))
    with SampleWriter(proxy.url, run.run_id, encoding="zstd") as writer:
        for number, sample in enumerate(make_group("a", [0.0, 1.0, 0.5, 0.25])):
            writer.write({**sample, "tokens": tokens} if number % 2 else sample)
    assert proxy.requests("samples")[0].headers["Content-Type"] == "application/vnd.forebay.samples"
    rows = run.read(num_groups=1)["data"]
    assert [row.get("tokens") for row in rows] == [None, tokens, None, tokens]


def test_a_refused_sample_is_raised_and_the_others_are_stored(run: NativeRun) -> None:
    bad = make_sample(uid="bad", reward="much")
    with SampleWriter(run.server.url, run.run_id, limits=NEVER) as writer:
        for sample in (make_sample(uid="u1"), bad, make_sample(uid="u2")):
            writer.write(sample)
        with pytest.raises(SamplesRefused, match=r"'bad'.*reward must be a finite number") as refused:
            writer.flush()
        writer.flush()
    assert [(sample, error.field) for sample, error in refused.value.refusals] == [(bad, "reward")]
    assert uids(run) == ["u1", "u2"]
    assert (writer.num_acknowledged, writer.num_refused) == (2, 1)


def test_a_refused_sample_goes_to_whoever_asked_for_it(run: NativeRun) -> None:
    told: list[tuple[str, str]] = []
    with SampleWriter(
        run.server.url, run.run_id, on_refused=lambda sample, error: told.append((sample["uid"], error.code))
    ) as writer:
        writer.write(make_sample(uid="bad", messages=None))
        writer.write(make_sample(uid="good"))
    assert told == [("bad", "invalid_input")]
    assert uids(run) == ["good"]


def test_a_sample_that_is_too_large_costs_no_other(make_server: Callable[..., ServerProcess]) -> None:
    run = make_server(max_body_bytes=20_000).start_run()
    too_large = make_sample(uid="large", messages=[{"role": "user", "content": "x" * 30_000}])
    writer = SampleWriter(run.server.url, run.run_id)
    for sample in (make_sample(uid="u1"), too_large, make_sample(uid="u2")):
        writer.write(sample)
    with pytest.raises(SamplesRefused, match="larger than 20000 bytes"):
        writer.close()
    assert uids(run) == ["u1", "u2"]


def test_a_full_buffer_blocks_the_writer_until_a_trainer_reads(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, max_buffer_size=2)
    samples = [sample for name in "abc" for sample in make_group(name, [0.0, 1.0])]
    with SampleWriter(server.url, run.run_id, limits=Limits(max_waiting=2, max_age_s=0)) as writer:
        thread = threading.Thread(target=lambda: [writer.write(sample) for sample in samples])
        thread.start()
        poll_until(lambda: writer.num_acknowledged == 2)
        assert thread.is_alive()
        seen = []
        while len(seen) < 3:
            batch = run.read(num_groups=1, wait_s=20)
            run.client.post(f"{run.path}/batches/{batch['batch_id']}/ack")
            seen.append(batch["data"][0]["instance_id"])
        thread.join()
    assert seen == ["a", "b", "c"]


def test_what_completes_an_open_group_gets_past_what_must_wait(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, max_buffer_size=1)
    first, second = make_group("a", [0.0, 1.0])
    with SampleWriter(server.url, run.run_id, limits=Limits(max_samples=1, max_age_s=0)) as writer:
        writer.write(first)
        writer.write(make_sample(uid="b", instance_id="b"))
        writer.write(second)
        batch = run.read(num_groups=1, wait_s=20)
        assert [row["instance_id"] for row in batch["data"]] == ["a", "a"]
        run.client.post(f"{run.path}/batches/{batch['batch_id']}/ack")
    assert "b" in uids(run)


@pytest.mark.soak
def test_a_restarted_server_is_not_noticed(make_server: Callable[..., ServerProcess]) -> None:
    server = make_server()
    run = server.start_run()
    with SampleWriter(server.url, run.run_id, limits=Limits(max_age_s=0)) as writer:
        writer.write(make_sample(uid="u1"))
        writer.flush()
        server.kill9()
        writer.write(make_sample(uid="u2"))
        server.restart()
        writer.flush()
    assert uids(run) == ["u1", "u2"]


def test_a_server_that_stays_away_is_told_at_every_call(run: NativeRun, proxy: FaultyProxy) -> None:
    proxy.plan(*["lose request"] * 1_000)
    writer = SampleWriter(proxy.url, run.run_id, retry_for_s=0.2)
    writer.write(make_sample())
    for call in (writer.flush, lambda: writer.write(make_sample()), writer.close):
        with pytest.raises(ServerUnreachable):
            call()


def test_an_unknown_run_is_told(server: ServerProcess) -> None:
    with pytest.raises(RunNotFound, match="no-such-run"), SampleWriter(server.url, "no-such-run") as writer:
        writer.write(make_sample())


def test_an_error_in_the_block_arrives_and_what_was_written_is_sent(run: NativeRun) -> None:
    def generate() -> None:
        with SampleWriter(run.server.url, run.run_id, limits=NEVER) as writer:
            writer.write(make_sample(uid="u"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generate()
    assert uids(run) == ["u"]


def test_a_closed_writer_takes_nothing(run: NativeRun) -> None:
    writer = SampleWriter(run.server.url, run.run_id)
    writer.close()
    with pytest.raises(WriterClosed, match="closed"):
        writer.write(make_sample())


def test_what_is_no_sample_is_refused_at_once(run: NativeRun) -> None:
    with SampleWriter(run.server.url, run.run_id) as writer, pytest.raises(TypeError):
        writer.write(make_sample(extra=object()))


def test_the_private_address_of_a_run_needs_no_run_id(
    make_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    write_generator(tmp_path / "tasks", TELLS_ADDRESS, "tells_generator.py")
    told = tmp_path / "address"
    run = make_server(generators=tmp_path / "tasks").start_run("tells", tell=str(told))
    address = poll_until(lambda: told.exists() and told.read_text())
    with SampleWriter(address) as writer:
        writer.write(make_sample(uid="u"))
    assert uids(run) == ["u"]


async def test_the_awaited_writer_does_the_same(run: NativeRun, proxy: FaultyProxy) -> None:
    proxy.plan("lose reply", "busy", path="samples")
    bad = make_sample(uid="bad", reward=None)
    async with AsyncSampleWriter(proxy.url, run.run_id, encoding="gzip", limits=Limits(max_waiting=2)) as writer:
        for sample in make_group("a", [0.0, 1.0, 0.5, 0.25]):
            await writer.write(sample)
        await writer.flush()
        assert await asyncio.to_thread(uids, run) == [f"a/{n}" for n in range(4)]
        await writer.write(bad)
        with pytest.raises(SamplesRefused, match="bad"):
            await writer.flush()
    assert proxy.is_calm


async def test_large_arrays_do_not_block_the_event_loop(run: NativeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    has_gone_on, digest_of = threading.Event(), parts.digest_of

    def digest_later(*pieces: bytes | memoryview) -> str:
        assert has_gone_on.wait(TIME_LIMIT_S)
        return digest_of(*pieces)

    monkeypatch.setattr(parts, "digest_of", digest_later)
    sample = make_sample(tokens=[*range(1_001)], logprobs=[0.0] * 1_001, loss_mask=[1] * 1_001)
    routes = Rows(numpy.zeros((1_000, 16_384), "uint8"), [(0, 1_000)])
    async with AsyncSampleWriter(run.server.url, run.run_id) as writer:
        written = asyncio.create_task(writer.write({**sample, "arrays": {"routes": routes}}))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not written.done()
        has_gone_on.set()
        await written
    assert writer.num_acknowledged == 1


async def test_who_waits_for_the_writer_hears_of_a_run_that_is_gone(server: ServerProcess) -> None:
    writer = AsyncSampleWriter(server.url, "no-such-run")
    ended = asyncio.create_task(writer.watch())
    await writer.write(make_sample())
    with pytest.raises(RunNotFound, match="no-such-run"):
        await ended
    with pytest.raises(RunNotFound):
        await writer.close()
