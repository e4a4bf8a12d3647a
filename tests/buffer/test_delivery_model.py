"""Leases, checkpoints and rewinds, driven by hypothesis through crashes, against a plain model of the promise."""

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.leases.checkpoints import checkpoint, rewind
from forebay.buffer.leases.leases import Leases
from forebay.buffer.reads.delivery import LeasedBatch
from forebay.buffer.store.abc import Store
from forebay.buffer.store.journal import JournalStore
from forebay.core.errors import (
    BatchAcked,
    BatchNotFound,
    CheckpointConflict,
    CheckpointNotFound,
    LeaseLost,
    StorageFailed,
)
from forebay.core.records.rows import BatchRow
from tests.buffer.buffer_kit import check_books, fill, make_run, read, rows_of, write
from tests.buffer.buffer_machine import BufferMachine, OnDisk
from tests.buffer.delivery_promise import Model, Promise
from tests.buffer.store.faulty_disks import RefusingFiles

LEASE_S = 100.0
MAX_STALENESS = 1
STEPS = st.integers(0, 4)


class DeliveryModel(BufferMachine):
    """Writers add whole groups; readers do everything that the API lets them do, and crashes come in between."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(MAX_STALENESS)
        self.num_groups = 0
        self.num_forks: Counter[Any] = Counter()
        """By instance."""

    @property
    def leases(self) -> Leases:
        return self.entry.delivery.leases

    @property
    def groups(self) -> dict[str, SampleGroup]:
        return self.entry.buffer.groups.by_id

    @property
    def batches(self) -> dict[str, BatchRow]:
        return self.entry.buffer.batches.by_id

    @initialize()
    def start(self) -> None:
        self.open(self.store)
        self.do(self.buffer.add(make_run(max_staleness=MAX_STALENESS)))
        self.write(5)

    def batch_ids(self) -> st.SearchStrategy[str]:
        return st.sampled_from(sorted(self.model.batches))

    def fails(self, work: Awaitable[Any], error: type[Exception]) -> None:
        with pytest.raises(error):
            self.do(work)

    # --- writers

    @rule(number=st.integers(1, 4))
    def write(self, number: int) -> None:
        version = self.model.version or 0
        for _ in range(number):
            self.num_groups += 1
            self.do(fill(self.entry, self.num_groups, [0.0, 1.0], weight_version=version))
            self.model.made_by[list(self.groups)[-1]] = version

    @rule(forks=st.integers(1, 2))
    def write_with_forks(self, forks: int) -> None:
        """Beside each main sample so many forks, which a slime read leaves out."""
        self.num_groups += 1
        at = {"instance_id": self.num_groups, "epoch": 0}
        for slot in range(2):
            for fork in (*range(1, forks + 1), 0):
                told = at | {"slot": slot, "fork": fork, "rollout_id": f"r{slot}", "reward": float(slot)}
                self.do(write(self.entry, **told))
        self.num_forks[self.num_groups] = 2 * forks

    @rule()
    def write_one_that_fails(self) -> None:
        self.num_groups += 1
        self.do(fill(self.entry, self.num_groups, [None, None]))
        self.do(self.entry.group_judge.evaluate())
        self.model.discarded |= {key for key, group in self.groups.items() if group.state == "discarded"}

    # --- readers

    @rule(
        num_groups=st.integers(1, 3),
        request_id=st.sampled_from(["", "", "a", "b"]),
        is_slime=st.sampled_from([False, False, False, True]),
        ending=st.sampled_from(["arrives", "arrives", "arrives", "goes on", "is cut off"]),
    )
    def read(self, num_groups: int, request_id: str, is_slime: bool, ending: str) -> None:
        request_id = "" if is_slime else request_id
        known = self.model.of_request(request_id)
        work = read(self.entry, num_groups=num_groups, request_id=request_id, is_slime=is_slime, lease_s=LEASE_S)
        if known is not None and known[1].state == "acked":
            self.fails(work, BatchAcked)
            return
        batch = self.do(work)
        if known is not None and known[1].state == "leased":
            assert batch is not None
            self.check_same(batch, *known)
        else:
            self.model.discard_stale()
            if batch is None:
                assert sum(self.model.owner(key) == "ready" for key in self.groups) < num_groups
                return
            self.check_new(batch, num_groups, request_id, is_slime)
        assert self.do(self.entry.delivery.confirm(batch))
        if ending != "goes on":
            self.end_reply(batch.batch_id, ending == "arrives")

    def check_same(self, batch: LeasedBatch, batch_id: str, before: Promise) -> None:
        assert batch.batch_id == batch_id
        assert (rows_of(batch), batch.meta_info) == (before.rows, before.meta_info)
        before.until_s = self.clock.monotonic() + LEASE_S  # each read restarts the lease
        before.begin_reply()

    def check_new(self, batch: LeasedBatch, num_groups: int, request_id: str, is_slime: bool) -> None:
        assert batch.batch_id not in self.model.batches
        keys = [group.group_id for group in batch.groups]
        ready = [key for key in self.groups if self.model.owner(key) == "ready"]
        assert keys == sorted(ready, key=lambda key: self.groups[key].row.order)[:num_groups], "oldest first, once"
        rows = rows_of(batch)
        instances = [self.groups[key].instance_id for key in keys]
        sizes = [2 if is_slime else 2 + self.num_forks[instance_id] for instance_id in instances]
        expected = [each for each, size in zip(instances, sizes, strict=True) for _ in range(size)]
        assert [row["instance_id"] for row in rows] == expected
        assert not is_slime or not any(row.get("fork") for row in rows)
        told = Counter(batch.meta_info["finished_groups"])
        assert told == Counter(group.instance_id for group in (*batch.groups, *batch.reported))
        self.model.batches[batch.batch_id] = Promise(keys, rows, batch.meta_info, request_id, is_slime)

    @precondition(lambda self: any(batch.num_sending for batch in self.model.batches.values()))
    @rule(data=st.data(), arrives=st.booleans())
    def end_a_reply(self, data: st.DataObject, arrives: bool) -> None:
        sending = sorted(key for key, batch in self.model.batches.items() if batch.num_sending)
        self.end_reply(data.draw(st.sampled_from(sending)), arrives)

    def end_reply(self, batch_id: str, arrives: bool) -> None:
        delivery, batch = self.entry.delivery, self.model.batches[batch_id]
        self.call(delivery.leases.arrived if arrives else delivery.leases.abandoned, batch_id)
        batch.end_reply(arrives)
        if batch.state != "leased":
            return
        if batch.is_self_acking:
            batch.state = "acked" if arrives else "released"
        elif arrives:
            batch.until_s = self.clock.monotonic() + LEASE_S
        elif not batch.num_holding and not batch.has_arrived:
            batch.state = "released"

    # --- what a trainer says

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        batch_id = data.draw(self.batch_ids())
        batch = self.model.batches[batch_id]
        if not self.model.is_takeable(batch):
            self.fails(self.leases.ack(batch_id), LeaseLost)
            return
        self.do(self.leases.ack(batch_id))
        batch.state = "acked"

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        batch_id = data.draw(self.batch_ids())
        batch = self.model.batches[batch_id]
        if batch.state == "acked":
            self.fails(self.leases.release(batch_id), BatchAcked)
            return
        self.do(self.leases.release(batch_id))
        batch.state = "revoked" if batch.state == "revoked" else "released"

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        batch_id = data.draw(self.batch_ids())
        batch = self.model.batches[batch_id]
        if batch.state == "acked" or not self.model.is_takeable(batch):
            self.fails(self.leases.extend(batch_id, None), BatchAcked if batch.state == "acked" else LeaseLost)
            return
        self.do(self.leases.extend(batch_id, None))
        batch.state, batch.until_s = "leased", self.clock.monotonic() + LEASE_S

    @rule(further=st.integers(1, 2))
    def announce(self, further: int) -> None:
        version = self.model.version = (self.model.version or 0) + further
        self.do(self.buffer.update("run-1", lambda run: setattr(run, "weight_version", version)))

    @rule(step=STEPS, data=st.data())
    def checkpoint(self, step: int, data: st.DataObject) -> None:
        names_some = self.model.batches and data.draw(st.booleans())
        ids = data.draw(st.lists(self.batch_ids(), max_size=3, unique=True)) if names_some else None
        acked = [key for key, b in self.model.batches.items() if b.state == "acked" and b.checkpoint is None]
        meant = [self.model.batches[key] for key in (acked if ids is None else ids)]
        is_other = any(batch.checkpoint not in (None, step) for batch in meant)
        is_back = any(batch.checkpoint is None for batch in meant) and step < max(self.model.steps, default=0)
        if not all(self.model.is_takeable(batch) for batch in meant):
            self.fails(checkpoint(self.leases, step, ids), LeaseLost)
        elif is_other or is_back:
            self.fails(checkpoint(self.leases, step, ids), CheckpointConflict)
        else:
            held = self.do(checkpoint(self.leases, step, ids))
            for batch in meant:
                batch.state, batch.checkpoint = "acked", step
            self.model.steps.setdefault(step, self.model.version)
            expected = {key for key, batch in self.model.batches.items() if batch.checkpoint == step}
            assert {row.batch_id for row in held} == expected

    @rule(step=st.none() | STEPS)
    def rewind(self, step: int | None) -> None:
        if step is not None and step not in self.model.steps:
            self.fails(rewind(self.leases, step), CheckpointNotFound)
            return
        undone = self.do(rewind(self.leases, step))
        assert {row.batch_id for row in undone.batches} == self.model.undo(step)

    @rule()
    def ask_for_what_is_not_there(self) -> None:
        self.fails(self.leases.ack("batch-none"), BatchNotFound)
        self.fails(checkpoint(self.leases, 9, ["batch-none"]), BatchNotFound)

    # --- time and crashes

    @rule(seconds=st.sampled_from([1.0, LEASE_S - 1, LEASE_S + 1]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.do(self.buffer.tick())
        for batch in self.model.batches.values():
            is_held = batch.state == "leased" and not batch.is_self_acking and not batch.num_holding
            if is_held and batch.until_s <= self.clock.monotonic():
                batch.state = "expired"

    @rule(is_crash=st.booleans())
    def restart(self, is_crash: bool) -> None:
        self.open_again(self.crashed_store() if is_crash else self.store)
        for batch in self.model.batches.values():
            batch.num_sending, batch.num_holding, batch.has_arrived = 0, 0, True
            batch.until_s = self.clock.monotonic() + LEASE_S
            if batch.state == "leased" and batch.is_self_acking:
                batch.state = "released"

    # --- what always holds

    @invariant()
    def every_group_is_where_it_was_promised_to_be(self) -> None:
        if not hasattr(self, "buffer"):
            return
        check_books(self.entry)
        self.do(self.entry.group_judge.evaluate())
        assert {key: group.state.value for key, group in self.groups.items()} == {
            key: self.model.owner(key) for key in self.groups
        }
        assert len(self.groups) == self.num_groups
        assert self.entry.buffer.batches.steps == sorted(self.model.steps)
        assert self.entry.run.weight_version == self.model.version
        assert {key: (row.state.value, row.checkpoint_step) for key, row in self.batches.items()} == {
            key: (batch.state, batch.checkpoint) for key, batch in self.model.batches.items()
        }

    @invariant()
    def each_undelivered_group_is_told_of_by_one_batch_or_by_the_next(self) -> None:
        if not hasattr(self, "buffer"):
            return
        held = [row for row in self.batches.values() if row.state in ("leased", "acked")]
        told = Counter(key for row in held for key in row.reported_ids if self.groups[key].row.batch_id == row.batch_id)
        told.update(list(self.entry.buffer.groups.unreported))
        assert told == Counter(self.model.discarded)


class JournalDeliveryModel(OnDisk, DeliveryModel):
    """The same on a disk, which may refuse."""

    def open_journal(self) -> Store:
        self.files = RefusingFiles()
        return JournalStore(self.path, files=self.files)

    @precondition(lambda self: self.model.batches)
    @rule(what=st.sampled_from(["ack", "release", "extend", "checkpoint", "rewind", "read"]), data=st.data())
    def refuse(self, what: str, data: st.DataObject) -> None:
        """The disk refuses: the trainer is told so, and nothing has happened."""
        batch_id = data.draw(self.batch_ids())
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "ack": lambda: self.leases.ack(batch_id),
            "release": lambda: self.leases.release(batch_id),
            # For as long as before, nothing need be stored: then the disk is not asked.
            "extend": lambda: self.leases.extend(batch_id, LEASE_S + 1),
            "checkpoint": lambda: checkpoint(self.leases, 5, None),
            "rewind": lambda: rewind(self.leases, None),
            "read": lambda: read(self.entry, num_groups=1, lease_s=LEASE_S),
        }
        self.do(self.store.load_runs())
        self.files.refuses_sync = True
        with suppress(StorageFailed, LeaseLost, BatchAcked):
            assert self.do(calls[what]()) is None, "it was told that it is done"
        with suppress(StorageFailed):  # what nobody has waited for is refused as well
            self.do(self.entry.buffer.save_run())
        self.files.refuses_sync = False
        self.do(self.buffer.update("run-1", lambda _: None))
        self.note_begun_anew()

    def note_begun_anew(self) -> None:
        """A lease that was just ending when the disk refused begins anew; a reply that acknowledges itself is lost."""
        for batch_id, batch in self.model.batches.items():
            lease = self.leases.held.get(batch_id)
            if batch.state == "leased" and lease is not None:
                batch.num_sending = batch.num_holding = lease.num_readers
                batch.until_s = lease.until_s
                batch.has_arrived |= lease.has_arrived
            elif batch.state == "leased":
                assert batch.is_self_acking
                batch.state = "released"


TestDeliveryInMemory = DeliveryModel.TestCase
TestDeliveryInMemory.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestDeliveryOnDisk = JournalDeliveryModel.TestCase
TestDeliveryOnDisk.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
