"""A recorded engine in place of a real one: the same answers to the same requests, without paying for them again."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Literal, Self, get_args

from forebay.core.errors import InvalidInput
from forebay.replay.call_request import CallRequest, Match
from forebay.replay.engine.call_writer import CallWriter
from forebay.replay.engine.cassette import Cassette
from forebay.replay.engine.engine_recorder import UpstreamRecording
from forebay.replay.engine.relay import Upstream
from forebay.replay.engine.replay_answers import ReplayAnswers
from forebay.replay.engine.served_engine import ServedEngine
from forebay.replay.errors import NotRecorded
from forebay.replay.recording import open_file
from forebay.web.serving import entered_in_thread

MAX_MISSES = 1_000
Record = Literal["missing", "once"]
"""What ``upstream`` is asked: all that is missing from a file, or everything where there is no file yet."""


class RecordedEngine(ServedEngine):
    """A server on a free port (or ``port``) of ``host`` that answers as the engine did whose calls are in ``file``.

    Enter with ``async with``, or with ``with engine.in_thread()`` where no event loop runs::

        with RecordedEngine("calls.fbr").in_thread() as engine:
            ...  # give engine.url to what is tested; engine.calls, engine.misses

    The k-th of equal requests gets the k-th recorded answer, of its own group and slot first, and none is given twice,
    unless ``again``: after the last comes the first. ``speed`` 1 takes the time that it took, 2 half of it, 0 none.
    What was not recorded is a 422 that tells the nearest request; with ``upstream`` that engine is asked, and its
    answer added to ``file``.

    With ``record="once"``, ``upstream`` is asked only while there is no ``file``: the first time makes it, and later
    ones replay it. ``match`` gets the body of each request as JSON and returns what to compare, without the parts that
    change, such as dates or ids.

    Leaving raises ``NotRecorded`` for what is in ``misses``: a test that expects misses looks at them, and clears the
    list. Entering raises ``NotRecorded`` for a file without calls, ``FileNotFoundError``, ``RecordingDamaged`` for what
    is no recording of this version's, or is damaged anywhere, and ``InvalidInput`` where it cannot listen.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        speed: float = 0.0,
        upstream: str | None = None,
        *,
        record: Record = "missing",
        match: Match | None = None,
        again: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed_hosts: Sequence[str] = (),
        insecure: bool = False,
    ) -> None:
        super().__init__(host, port, allowed_hosts, insecure)
        if not 0 <= speed < float("inf"):
            hint = "0: answers come at once; 1: as recorded; 2: twice as fast"
            raise InvalidInput(f"speed must be a number from 0 on, got {speed}", hint=hint, field="speed")
        if record not in get_args(Record):
            raise InvalidInput(f"record must be 'missing' or 'once', got {record!r:.100}", field="record")
        self.misses: list[str] = []
        """What was asked for and not recorded, in words; the first 1 000. May be cleared."""
        self._num_more_misses = 0
        self._file = Path(file)
        self._speed = speed
        self._record = record
        self._match = match
        self._again = again
        self._upstream = None if upstream is None else Upstream(upstream)
        self._cassette: Cassette
        self._answers: ReplayAnswers

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await super().__aexit__(kind, error, traceback)
        self._tell_misses(error)

    @property
    def calls(self) -> list[CallRequest]:
        """The calls that got recorded answers or went to ``upstream``, as they arrived; the last 10 000, or 64 MiB."""
        return list(self._answers.given)

    @property
    def unused(self) -> list[CallRequest]:
        """The recorded calls that sampled and were not asked for, in the order of the recording."""
        return self._cassette.unused()

    @property
    def num_misses(self) -> int:
        """How many there were since ``misses`` was cleared, with those for which it had no room."""
        return len(self.misses) + self._num_more_misses if self.misses else 0

    @property
    def num_recorded(self) -> int:
        """The answers in the file."""
        return len(self._cassette)

    @contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Serve from a thread of its own, for code without an event loop. Raises what entering and leaving raise."""
        try:
            with entered_in_thread(self, "recorded-engine"):
                yield self
        except BaseException as error:
            if not isinstance(error, NotRecorded):
                self._tell_misses(error)
            raise

    async def enter(self, stack: AsyncExitStack) -> None:
        """Open the file, and serve."""
        self.misses.clear()
        recording = await self._recording(stack)
        self._cassette = await asyncio.to_thread(Cassette, self._file, wraps=self._again, match=self._match)
        stack.callback(self._cassette.close)
        if not len(self._cassette) and recording is None:
            hint = "what was exported of a run is replayed with: forebay start --replay FILE"
            raise NotRecorded(f"{self._file.name} has no calls of an engine", hint=hint)
        self._answers = ReplayAnswers(self._cassette, self._speed, recording, self._miss)
        await self.serve(stack, self._answers.answer)
        # Called before the server shuts down: it waits for its connections, and those wait for their answers.
        stack.callback(self._answers.state.stop)

    async def _recording(self, stack: AsyncExitStack) -> UpstreamRecording | None:
        """The recording that ``upstream`` adds to, if there is one."""
        is_new = self._record == "once" and not self._file.exists()
        if self._upstream is None and is_new:
            how = "to make it, give upstream=URL, or run pytest --record-engine URL"
            raise FileNotFoundError(f"there is no recording {str(self._file)!r:.200}: {how}")
        if self._upstream is None or (self._record == "once" and not is_new):
            return None
        if not is_new:
            open_file(self._file).close()  # else the writer would make it
        writer = await asyncio.to_thread(CallWriter, self._file)
        if is_new:  # a file without calls would be replayed the next time
            stack.callback(lambda: None if len(self._cassette) else self._file.unlink())
        stack.push_async_callback(asyncio.to_thread, writer.close)
        stack.push_async_callback(self._upstream.close)
        return UpstreamRecording(self._upstream, writer)

    def _miss(self, words: str) -> None:
        if not self.misses:  # they may have been cleared
            self._num_more_misses = 0
        if len(self.misses) < MAX_MISSES:
            self.misses.append(words)
        else:
            self._num_more_misses += 1

    def _tell_misses(self, error: BaseException | None) -> None:
        """Raise what was missed, or note it on what has been raised already."""
        if not self.misses:
            return
        count = "a call was" if self.num_misses == 1 else f"{self.num_misses:,} calls were"
        words = f"{count} not recorded; the first: {self.misses[0]}"
        if error is not None:
            error.add_note(words)
            return
        how = f"remove {self._file}" if self._record == "once" else "use forebay engine record"
        raise NotRecorded(words, hint=f"{how} to record again, or send the requests as they were recorded")
