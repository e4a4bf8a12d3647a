"""Finds the stored parts of groups."""

from collections.abc import Awaitable, Callable, Sequence

from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import Store
from forebay.core.errors import BodyUnreadable
from forebay.core.parts import PartNotFound, PartsGone
from forebay.core.records.rows import Location, StoredSample

KEEP_MORE = "raise the run's keep_checkpoints to keep more, or set its keep_bodies to keep all"
"""What to do about ``PartsGone``."""


async def at_rest(store: Store, look_up: Callable[[], Awaitable[list[StoredSample]]]) -> list[StoredSample]:
    """What ``look_up`` finds. Until the caller awaits again, the store holds each body, or has removed it."""
    while True:
        # During the removal of a segment, its bodies may be about to move.
        await store.wait_for_removals()
        found = await look_up()
        if all(store.holds(each.location) or store.has_removed(each.location) for each in found):
            return found


async def find_parts(buffer: RunBuffer, group_ids: Sequence[str], digests: Sequence[str], where: str) -> list[Location]:
    """Where these parts of the groups are stored, in order; each is verified. ``where`` names the groups in errors.

    Raises ``PartNotFound``, ``PartsGone``, ``BodyUnreadable``, ``StorageFailed``.
    """
    store, asked = buffer.store, dict.fromkeys(digests)

    async def look_up() -> list[StoredSample]:
        found = await store.samples_of(buffer.run.run_id, group_ids)
        return [each for samples in found.values() for each in samples if each.row.digest and each.row.digest in asked]

    stored = await at_rest(store, look_up)
    # Two groups may have the same part; one that is still there counts.
    stored.sort(key=lambda each: store.holds(each.location))
    known = {each.row.digest: each.location for each in stored}
    if missing := [digest for digest in asked if digest not in known]:
        hint = "the field parts of a sample lists the digests of its parts"
        raise PartNotFound(f"{where} has no part {', '.join(missing[:20])}", hint=hint)
    if gone := [digest for digest in asked if not store.holds(known[digest])]:
        raise PartsGone(f"retention has removed the parts {', '.join(gone[:20])}", hint=KEEP_MORE)
    for digest in asked:
        try:
            await store.prove([known[digest]])
        except BodyUnreadable as error:
            raise BodyUnreadable(f"part {digest}: {error.reason}") from error
    return [known[digest] for digest in digests]
