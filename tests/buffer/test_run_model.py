"""A run in all its states, driven by hypothesis, against a plain account of what its clients were told."""

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from forebay.buffer.admission import expect_repeats
from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.reads.delivery import LeasedBatch
from forebay.buffer.resume import covers, reconcile
from tests.buffer.buffer_kit import check_books, make_run, put, read, rows_of
from tests.buffer.buffer_machine import BufferMachine, OnDisk

GROUP_SIZE = 3
LONG_S = 1e7
"""No lease expires here: test_delivery_model.py has those."""
REQUESTS: list[dict[str, Any]] = [
    {},
    {"num_groups": 1, "lease_s": LONG_S},
    {"batch_size": 4, "lease_s": LONG_S},
    {"batch_size": 3, "is_slime": True},
]
REWARDS = st.sampled_from([0.0, 0.0, 1.0, 0.5, 7.0, None])
INSTANCES = st.sampled_from([1, "1", 2])


class RunModel(BufferMachine):
    """``accepted`` is what writers were told, ``held`` and ``acked`` what the reader has."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: dict[str, str] = {}
        self.written_forks: dict[str, tuple[Any, ...]] = {}
        """Of samples that tell their rollout: instance, epoch, slot, rollout, and which fork, 0 for the main one."""
        self.judged: set[tuple[Any, ...]] = set()
        """Those whose main sample is in a group and did not fail."""
        self.held: list[LeasedBatch] = []
        self.acked: set[str] = set()
        self.told: Counter[Any] = Counter()

    @property
    def groups(self) -> list[SampleGroup]:
        return list(self.entry.buffer.groups.by_id.values())

    @initialize(ratio=st.sampled_from([0.34, 1.0]))
    def start(self, ratio: float) -> None:
        self.open(self.store)
        run = make_run(group_size=GROUP_SIZE, min_valid_group_size_ratio=ratio, min_valid_item_size_ratio=0.34)
        self.do(self.buffer.add(run))

    # --- writers

    @rule(instance_id=INSTANCES, epoch=st.integers(0, 1), slot=st.integers(0, GROUP_SIZE), reward=REWARDS)
    def write_native(self, instance_id: str | int, epoch: int, slot: int, reward: float | None) -> None:
        self.write(instance_id, reward, epoch=epoch, slot=slot)

    @rule(
        instance_id=INSTANCES,
        epoch=st.integers(0, 1),
        slot=st.integers(0, GROUP_SIZE),
        rollout=st.sampled_from(["x", "x", "y"]),
        kinds=st.sampled_from([(1, 0), (1, 2, 0), (1,), (0,), (0, 1)]),
        reward=REWARDS,
    )
    def write_forks(
        self, instance_id: str | int, epoch: int, slot: int, rollout: str, kinds: tuple[int, ...], reward: float | None
    ) -> None:
        """Forks and their main sample (0): in order, broken off, alone, or in the wrong order."""
        for fork in kinds:
            uid = f"uid-{len(self.accepted)}"
            self.written_forks[uid] = (instance_id, epoch, slot, rollout, fork)
            told = 0.5 if fork and reward is None else reward
            self.write(instance_id, told, epoch=epoch, slot=slot, rollout_id=rollout, fork=fork)
            if self.accepted[uid] == "member" and not fork and reward is not None:
                self.judged.add((instance_id, epoch, slot, rollout))

    @rule(instance_id=st.sampled_from(["foreign", 3]), reward=REWARDS, number=st.integers(1, GROUP_SIZE))
    def write_foreign(self, instance_id: str | int, reward: float | None, number: int) -> None:
        for _ in range(number):
            self.write(instance_id, reward)

    @rule(rewards=st.sampled_from([(0.0, 1.0, 0.5), (0.0, 1.0, None), (1.0, 1.0, 1.0)]))
    def write_a_group(self, rewards: tuple[float | None, ...]) -> None:
        instance_id = f"group-{len(self.accepted)}"
        for reward in rewards:
            self.write(instance_id, reward)

    def write(self, instance_id: str | int, reward: float | None, **place: Any) -> None:
        uid = f"uid-{len(self.accepted)}"
        outcome = {"reward": reward} if reward is not None else {"reward": ..., "status": "failed"}
        self.accepted[uid] = self.do(self._written(uid=uid, instance_id=instance_id, **outcome, **place))

    async def _written(self, **sample: Any) -> str:
        result = put(self.entry, **sample)
        await result.stored
        return "duplicate" if result.is_duplicate else result.outcome

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def write_again(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.accepted)))
        assert self.do(self._written(uid=uid, instance_id="foreign", reward=1.0)) == "duplicate"

    # --- readers

    @rule(request=st.sampled_from(REQUESTS))
    def read(self, request: dict[str, Any]) -> None:
        batch = self.do(read(self.entry, **request))
        if batch is None:
            return
        unavailable = self.acked | {group.group_id for held in self.held for group in held.groups}
        ids = [group.group_id for group in batch.groups]
        assert len(set(ids)) == len(ids)
        assert not unavailable & set(ids), "a group is with two readers"
        members = {uid for uid, outcome in self.accepted.items() if outcome == "member"}
        uids = [row["uid"] for row in rows_of(batch)]
        assert set(uids) <= members
        self.check_forks(uids, batch)
        wanted = Counter(group.instance_id for group in (*batch.groups, *batch.reported))
        assert Counter(batch.meta_info["finished_groups"]) == wanted
        assert all(group.state == "discarded" for group in batch.reported)
        assert not self.entry.buffer.groups.unreported
        self.held.append(batch)

    def check_forks(self, uids: list[str], batch: LeasedBatch) -> None:
        """Only forks of judged rollouts go out, once; their main sample may be filtered. A slime group has its size."""
        forks = [uid for uid in uids if self.written_forks.get(uid, (0,))[-1]]
        assert {self.written_forks[uid][:-1] for uid in forks} <= self.judged
        assert len(set(forks)) == len(forks), "no fork is copied"
        if batch.row.is_self_acking:
            assert len(uids) == GROUP_SIZE * len(batch.groups)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        batch = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.call(self.entry.delivery.leases.ack_soon, batch.batch_id)
        self.acked |= {group.group_id for group in batch.groups}
        self.told.update(batch.meta_info["finished_groups"])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        batch = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.call(self.entry.delivery.leases.release_soon, batch.batch_id)

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """The trainer comes back with a part of what it was told."""
        listed: list[Any] = []
        for instance_id, count in self.told.items():
            listed += [instance_id] * data.draw(st.integers(0, count))
        assert covers(self.entry.buffer, listed)
        self.do(reconcile(self.entry.delivery.leases, listed))
        self.do(expect_repeats(self.buffer.get("run-1").buffer))
        self.held.clear()
        self.acked = {group.group_id for group in self.groups if group.state == "acked"}
        self.told = Counter(listed)

    # --- time and processes

    @rule(seconds=st.sampled_from([1.0, 150.0, 301.0, 3_601.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.do(self.buffer.tick())
        now_s = self.entry.buffer.active.now_s()
        for group in self.groups:
            assert group.state != "open" or self.entry.deadlines.due_s(group) > now_s

    @rule(is_crash=st.booleans())
    def restart(self, is_crash: bool) -> None:
        before = self.lasting()
        self.open_again(self.crashed_store() if is_crash else self.store)
        self.lose_replies()
        assert self.lasting() == before

    def lose_replies(self) -> None:
        """What a restart does: a batch that would be acknowledged by its last byte is given back."""
        self.held = [batch for batch in self.held if not batch.row.is_self_acking]

    def lasting(self) -> dict[str, Any]:
        """What a restart must not change."""
        kept = {g.group_id for batch in self.held for g in batch.groups if not batch.row.is_self_acking}
        states = {g.group_id: "ready" if g.state == "leased" else g.state.value for g in self.groups}
        states |= {g.group_id: g.state.value for g in self.groups if g.group_id in kept}
        samples = {group.group_id: [sample.row.uid for sample in group.samples] for group in self.groups}
        return {"states": states, "samples": samples, "uids": sorted(self.entry.buffer.uids)}

    # --- what always holds

    @invariant()
    def every_accepted_sample_is_in_one_place(self) -> None:
        if not hasattr(self, "buffer"):
            return
        check_books(self.entry)
        assert set(self.entry.buffer.uids) == set(self.accepted)
        in_groups = Counter(sample.row.uid for group in self.groups for sample in group.samples)
        assert all(count == 1 and self.accepted[uid] == "member" for uid, count in in_groups.items())
        for group in self.groups:
            mains = [sample for sample in group.samples if not sample.row.fork]
            assert len(group.slots) == len(mains) <= GROUP_SIZE
            assert group.slots <= set(range(GROUP_SIZE))
            if group.samples:
                num_failed = sum(sample.row.reward is None for sample in mains)
                counted = (group.row.num_samples, group.row.num_failed, group.row.num_forks)
                assert counted == (len(mains), num_failed, len(group.samples) - len(mains))

    @invariant()
    def reports_are_those_of_the_ledger(self) -> None:
        if not hasattr(self, "buffer"):
            return
        acked = {group.group_id for group in self.groups if group.state == "acked"}
        assert acked == self.acked
        held = {group.group_id for batch in self.held for group in (*batch.groups, *batch.reported)}
        reported = [g for g in self.groups if g.row.is_reported and g.group_id not in held]
        assert Counter(group.instance_id for group in reported) == +self.told


class JournalModel(OnDisk, RunModel):
    """The same on a disk."""


TestRunInMemory = RunModel.TestCase
TestRunInMemory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRunOnDisk = JournalModel.TestCase
TestRunOnDisk.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
