"""Finds the recording for a replay: a run of this server, by id or name, or an exported file."""

import difflib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.journal_source import JournalSource
from forebay.core.errors import RunNotFound
from forebay.core.records.rows import GroupRow
from forebay.core.run import WORKING
from forebay.replay.errors import NotRecorded
from forebay.replay.options import ReplayOptions
from forebay.replay.recording_file import RecordingFile
from forebay.replay.source import Source
from forebay.replay.step_filter import chosen_groups
from forebay.server.runs.input_files import InputFiles

logger = logging.getLogger(__name__)


class ReplaySources:
    """Finds recordings, and keeps the stored data of runs while they are replayed."""

    def __init__(self, buffer: Buffer, files: InputFiles, default: str | None, max_body_bytes: int) -> None:
        """``default`` is the source of starts over slime's routes that name none."""
        self._buffer = buffer
        self._files = files
        self._max_body_bytes = max_body_bytes
        self.default = default
        self._held: dict[str, str] = {}
        """Ids of replayed runs, by the id of the run that replays them."""

    # --- finding

    async def find(self, options: ReplayOptions) -> str:
        """Resolve a source to the id of a run or the absolute path of a file.

        Raises ``RunNotFound``; ``InputRefused`` for a file outside of ``input_roots``.
        """
        if options.is_file:
            return str(await self._files.threads.call(self._files.allowed, options.source, "replay.source"))
        return self._find_run(options.source).run.run_id

    def _find_run(self, given: str) -> LiveRun:
        by_id = {entry.run.run_id: entry for entry in self._buffer.entries}
        if given in by_id:
            return by_id[given]
        named = [entry for entry in by_id.values() if entry.run.name == given and entry.buffer.groups.num_opened]
        # Replays may have the name of the run they replay.
        named = [entry for entry in named if entry.run.replay is None] or named
        if not named:
            raise self._not_found(given, list(by_id.values()))
        chosen = max(named, key=lambda entry: (entry.run.state not in WORKING, entry.run.started_at_s))
        if len(named) > 1:
            logger.info("of %d runs named %r, the newest is replayed: %s", len(named), given, chosen.run.run_id)
        return chosen

    def _not_found(self, given: str, entries: list[LiveRun]) -> RunNotFound:
        known = {text for entry in entries for text in (entry.run.run_id, entry.run.name) if text}
        near = difflib.get_close_matches(given, sorted(known - {given}), 3, cutoff=0.5)
        hint = f"near it: {', '.join(near)}" if near else "GET /v1/runs lists the runs; a file's name ends in .fbr"
        message = f"there is no run {given!r} to replay"
        if given in known:
            message, hint = f"no run named {given!r} has a sample", "start it without replay: none is recorded"
        return RunNotFound(given, message=message, hint=hint)

    @asynccontextmanager
    async def opened(self, options: ReplayOptions, found: str) -> AsyncIterator[Source]:
        """Open the source that ``find`` returned. Raises ``NotRecorded``, ``RunNotFound``, ``RecordingDamaged``."""
        if not options.is_file:
            yield JournalSource(self._buffer.get(found).run, self._buffer.store)
            return
        try:
            source = await self._files.threads.call(RecordingFile, Path(found), self._max_body_bytes)
        except FileNotFoundError as error:
            hint = "the path is one on the server's machine; relative ones start at its working directory"
            raise NotRecorded(str(error), hint=hint, field="replay.source") from None
        try:
            yield source
        finally:
            source.close()

    # --- keeping

    @asynccontextmanager
    async def kept(self, found: str) -> AsyncIterator[None]:
        """Prevent removal of bodies of the found source within this context; waits for a removal under way."""
        self._buffer.sources[found] += 1
        try:
            await self._buffer.store.wait_for_removals()
            yield
        finally:
            self._let_go(found)

    def hold(self, run_id: str, source_id: str) -> None:
        """Keep all data of the run ``source_id`` while ``run_id`` replays it."""
        if run_id not in self._held:
            self._held[run_id] = source_id
            self._buffer.sources[source_id] += 1

    def release(self, run_id: str) -> None:
        """Stop keeping the source of ``run_id``."""
        source_id = self._held.pop(run_id, None)
        if source_id is not None:
            self._let_go(source_id)

    def _let_go(self, source_id: str) -> None:
        self._buffer.sources[source_id] -= 1
        if not self._buffer.sources[source_id]:
            del self._buffer.sources[source_id]

    def hold_all(self) -> None:
        """Keep the sources of all replays after a restart, before retention may remove anything."""
        for run in (entry.run for entry in self._buffer.entries):
            if run.replay is not None and run.state in WORKING:
                self.hold(run.run_id, run.replay["source"])


async def groups_of(source: Source, options: ReplayOptions) -> list[GroupRow]:
    """The groups to replay, in the order in which they were delivered or ended. Raises ``NotRecorded``."""
    groups = await source.groups()
    if options.steps is not None:
        return chosen_groups(groups, await source.batches(), options.steps)
    # In a run that continues, an open group has only part of its samples.
    is_going_on = source.run.state in WORKING
    chosen = [group for group in groups if group.closed_seq or not is_going_on]
    return sorted(chosen, key=lambda group: (not group.closed_seq, group.closed_seq, group.number))
