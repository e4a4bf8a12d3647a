"""Runs that replay a recording without a process: the server writes the recorded samples itself."""

import asyncio
import logging
import traceback
from collections import Counter
from contextlib import suppress

from forebay.buffer.buffer import Buffer
from forebay.buffer.replay_feed import Feed
from forebay.core.errors import ForebayError, RunNotFound
from forebay.core.run import Run, RunState
from forebay.replay.options import ReplayOptions
from forebay.server.runs.records import RunRecords
from forebay.server.runs.replay_sources import ReplaySources, groups_of

logger = logging.getLogger(__name__)

REPORT_S = 1.0
STORED_WAIT_S = 2.0
"""Seconds that a stopped replay waits for the disk, to report its progress."""
TALLY = "replay"
"""Used in place of a process id, so that counts continue after a restart of the server."""


class Replays:
    """One task per run that is being fed. If a task fails, its run becomes ``failed``."""

    def __init__(self, buffer: Buffer, records: RunRecords, sources: ReplaySources) -> None:
        self._buffer = buffer
        self._records = records
        self._sources = sources
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def is_alive(self, run_id: str) -> bool:
        """Whether the run is being fed."""
        return run_id in self._tasks

    def begin(self, run_id: str) -> None:
        """Feed the run from the beginning of its recording; groups that it already has are kept."""
        replay = self._buffer.get(run_id).run.replay or {}
        self._sources.hold(run_id, str(replay.get("source", "")))
        self._tasks[run_id] = task = asyncio.create_task(self._run(run_id), name=f"replay {run_id}")
        task.add_done_callback(lambda _: self._tasks.pop(run_id, None))

    async def end(self, run_id: str) -> None:
        """Stop feeding a run. Written samples are kept; no outcome is recorded."""
        await self._cancel(run_id)
        self._sources.release(run_id)

    async def aclose(self) -> None:
        """Stop feeding all runs. They resume after a restart, and their sources are kept until then."""
        for run_id in list(self._tasks):
            await self._cancel(run_id)

    async def _cancel(self, run_id: str) -> None:
        task = self._tasks.get(run_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self, run_id: str) -> None:
        try:
            await self._feed(run_id)
        except ForebayError as error:
            with suppress(RunNotFound):  # the run or its source may have been removed
                await self._records.fail(run_id, error)
        except Exception:  # this task is not awaited, so its error would be lost
            logger.exception("the replay of run %s failed", run_id)
            await self._records.end(run_id, RunState.FAILED, traceback.format_exc())
        # Not after a cancellation: the caller knows whether the replay continues.
        self._sources.release(run_id)

    async def _feed(self, run_id: str) -> None:
        run = self._buffer.get(run_id).run
        options = ReplayOptions.parse(run.payload["replay"])
        if options is None or run.replay is None:
            raise RuntimeError(f"run {run_id} replays nothing")
        async with self._sources.opened(options, run.replay["source"]) as source:
            groups = await groups_of(source, options)
            # An id listed k times skips the instance's first k epochs.
            skipped = Counter(run.base_skip)
            groups = [group for group in groups if group.epoch >= skipped[group.instance_id]]
            await self._records.process_started(run_id, attempt=1)
            feed = Feed(lambda: self._buffer.get(run_id), source, groups)
            num_tokens = run.tally.current.get("replay_tokens", 0) if run.tally.process_id == TALLY else 0
            reporting = asyncio.create_task(self._keep_reporting(run_id, feed, num_tokens))
            try:
                await feed.run()
            except asyncio.CancelledError:
                await self._note_stopped(run_id, feed, num_tokens)
                raise
            finally:
                reporting.cancel()
                with suppress(asyncio.CancelledError):
                    await reporting
        await self._buffer.update(run_id, lambda run: _note_end(run, feed, num_tokens))
        await self._records.end(run_id, RunState.FINISHED, "replayed")

    async def _note_stopped(self, run_id: str, feed: Feed, num_tokens: int) -> None:
        # Tokens are counted when they are written, and never later.
        with suppress(ForebayError, TimeoutError):
            async with asyncio.timeout(STORED_WAIT_S):
                await feed.await_stored()
                await self._buffer.update(run_id, lambda run: _note_counts(run, feed, num_tokens))

    async def _keep_reporting(self, run_id: str, feed: Feed, num_tokens: int) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            feed.count_stored()
            if _counts(feed, num_tokens) != self._buffer.get(run_id).run.tally.current:
                await self._buffer.update(run_id, lambda run: _note_counts(run, feed, num_tokens))


def _note_counts(run: Run, feed: Feed, num_tokens: int) -> None:
    run.tally.report(TALLY, _counts(feed, num_tokens))


def _counts(feed: Feed, num_tokens: int) -> dict[str, int]:
    """Counts of a replay. ``num_tokens`` were counted before the server restarted."""
    counts = feed.counts
    return {
        "replay_hits": counts.hits,
        "replay_misses": counts.missing,
        "replay_substitutes": 0,
        "replay_tokens": counts.tokens + num_tokens,
    }


def _note_end(run: Run, feed: Feed, num_tokens: int) -> None:
    _note_counts(run, feed, num_tokens)
    run.is_last_slot_reported = True  # groups open now stay incomplete
    if feed.lost:
        why = next(iter(feed.lost.values()))
        count = "a group" if len(feed.lost) == 1 else f"{len(feed.lost)} groups"
        run.warnings = [*run.warnings, f"{count} could not be replayed; the first: {why}"]
