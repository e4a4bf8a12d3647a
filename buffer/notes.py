"""Stores notes about the samples of a batch, and finds them again (``core/records/notes.py``)."""

from asyncio import get_running_loop
from collections.abc import Mapping, Sequence
from functools import partial

from forebay.buffer.admission import Receipt, store_parts
from forebay.buffer.parts import KEEP_MORE, at_rest
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.errors import InvalidInput
from forebay.core.parts import PartsGone, SideArrays
from forebay.core.records.notes import Note, placed, read_key, stored_note, token_counts
from forebay.core.records.rows import NOTE_PREFIX, BatchRow, StoredSample, beside


class AnnotatedBatch:
    """The samples of a batch and their notes, for one request. Call ``look_up`` first."""

    def __init__(self, buffer: RunBuffer, batch: BatchRow) -> None:
        self._buffer = buffer
        self._batch = batch
        self._stored: dict[str, StoredSample] = {}
        self._new: set[str] = set()

    async def look_up(self) -> None:
        """Look up the samples and the notes. Raises ``StorageFailed``."""
        store, run_id, group_ids = self._buffer.store, self._buffer.run.run_id, self._batch.group_ids

        async def find() -> list[StoredSample]:
            found = await store.samples_of(run_id, group_ids)
            return [each for group in found.values() for each in group if each.row.outcome in ("member", "note")]

        self._stored = {each.row.uid: each for each in await at_rest(store, find)}

    async def place(self, note: Note, side: SideArrays) -> tuple[SideArrays, int]:
        """The arrays of a note at their tokens, and the number of tokens of its sample, if it has arrays.

        Raises ``InvalidInput``, ``PartsGone``, ``BodyUnreadable``.
        """
        store, sample = self._buffer.store, self._stored.get(note.uid)
        if sample is None or not sample.row.is_sample:
            message = f"uid: must be that of a sample of batch {self._batch.batch_id!r} (got {note.uid[:200]!r})"
            raise InvalidInput(message, field="uid", hint="name the batch in which the sample was read")
        if not side.arrays:
            return side, 0
        if not store.holds(sample.location):  # it may have been moved since
            await self.look_up()
            sample = self._stored[note.uid]
        if not store.holds(sample.location):
            raise PartsGone(f"retention has removed the sample {note.uid}", hint=KEEP_MORE)
        [body] = await store.read([sample.location])
        counts = token_counts(body)
        return placed(side, *counts), counts[0]

    def add(self, note: Note, side: SideArrays, parts: Mapping[str, bytes | memoryview]) -> Receipt:
        """Store a note that has been placed, unless it is stored already. Raises ``StorageFailed``."""
        buffer, (uid, body) = self._buffer, stored_note(note, side)
        if uid in self._new or uid in self._stored:
            known = get_running_loop().create_future()
            known.set_result(None)
            return Receipt(note.uid, "note", is_failed=False, stored=known, is_duplicate=True)
        buffer.check_storage()
        buffer.store.check_room()
        row = beside(self._stored[note.uid].row, uid, "note", buffer.active.now_s(), buffer.wall())
        store_parts(buffer, parts, row)
        self._new.add(uid)
        return Receipt(note.uid, "note", is_failed=False, stored=buffer.record(row, body=body))


async def find_notes(
    buffer: RunBuffer, step: int | None, uid: str | None, group: str, after: str, limit: int
) -> Sequence[StoredSample]:
    """Up to ``limit`` notes that have their bodies, by id, after the id ``after``; of one ``group`` or all."""
    store, run_id = buffer.store, buffer.run.run_id
    prefix = NOTE_PREFIX if step is None else f"{NOTE_PREFIX}{step}/"
    since_s = float(after.partition("-")[0] or 0) - 1e-6  # an id has its microseconds
    find = partial(store.samples, run_id, group) if group else partial(store.notes, run_id, prefix, since_s)
    notes = [each for each in await at_rest(store, find) if each.row.uid.startswith(prefix)]
    keys = ((read_key(each.row), each) for each in notes if store.holds(each.location))
    found = {note_id: each for (note_id, of_uid), each in keys if note_id > after and uid in (None, of_uid)}
    return [found[note_id] for note_id in sorted(found)[:limit]]
