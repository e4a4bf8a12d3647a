"""Entries of a log, each with a number by which it is known again; and what a store has."""

from forebay.buffer.store.abc import Store
from forebay.core.records.log_records import LogEntry, make_entry
from forebay.core.records.rows import SampleRow, TickRow


def entry(number: int, body: bytes = b"", *, has_body: bool = False) -> LogEntry:
    """A sample with ``body``; without one a tick, unless it ``has_body`` that is empty."""
    if not body and not has_body:
        return make_entry([TickRow(run_id="run-1", active_s=float(number))], None)
    row = SampleRow(
        run_id="run-1",
        uid=str(number),
        instance_id=1,
        group_id="g",
        epoch=0,
        slot=0,
        outcome="member",
        reward=1.0,
        at_s=float(number),
        received_at_s=0.0,
    )
    return make_entry([row], body)


async def all_uids(store: Store, run_id: str) -> set[str]:
    """The uid of every sample that a store has of a run."""
    by_group = await store.uids_by_group(run_id)
    assert by_group is not None, "there is no limit"
    return {uid for uids in by_group.values() for uid in uids}
