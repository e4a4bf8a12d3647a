"""A recorded engine replaces a real one: the same requests get the same answers, and nothing is generated again."""

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
"""When ``upstream`` is asked: for every call missing from the file, or only while the file does not exist."""


class RecordedEngine(ServedEngine):
    """A server on a free port (or ``port``) of ``host`` that replays the engine calls recorded in ``file``.

    Enter with ``async with``, or with ``with engine.in_thread()`` if no event loop is running::

        with RecordedEngine("calls.fbr").in_thread() as engine:
            ...  # give engine.url to the code under test; engine.calls, engine.misses

    The k-th of equal requests gets the k-th recorded answer, from its own group and slot first. No answer is given
    twice, unless ``again`` is set: the answers then start over after the last one. ``speed`` 1 replays the recorded
    delays, 2 halves them, 0 answers at once. A request that was not recorded gets a 422 that names the nearest recorded
    one. With ``upstream``, that engine is asked instead, and its answer is added to ``file``.

    With ``record="once"``, ``upstream`` is asked only while ``file`` does not exist: the first run creates it, and
    later runs replay it. ``match`` gets the body of each request as JSON and returns what to compare, without the
    parts that change, such as dates or ids.

    Leaving raises ``NotRecorded`` if ``misses`` is not empty. A test that expects misses checks and clears the list.
    Entering raises ``NotRecorded`` for a file without calls, ``FileNotFoundError``, ``RecordingDamaged`` if the file is
    not a recording of this version or is damaged anywhere, and ``InvalidInput`` if it cannot listen.
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
            hint = "0: answers come at once; 1: recorded speed; 2: twice as fast"
            raise InvalidInput(f"speed must be a finite number of at least 0 (got {speed})", hint=hint, field="speed")
        if record not in get_args(Record):
            raise InvalidInput(f"record must be 'missing' or 'once' (got {record!r:.100})", field="record")
        self.misses: list[str] = []
        """Describes the first 1 000 requests that were not recorded. May be cleared."""
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
        self._report_misses(error)

    @property
    def calls(self) -> list[CallRequest]:
        """The last calls (10 000, or 64 MiB) that got recorded answers or went to ``upstream``, in order of arrival."""
        return list(self._answers.given)

    @property
    def unused(self) -> list[CallRequest]:
        """The recorded calls that sampled and were never requested, in recorded order."""
        return self._cassette.unused()

    @property
    def num_misses(self) -> int:
        """The number of misses since ``misses`` was cleared, including those beyond its limit."""
        return len(self.misses) + self._num_more_misses if self.misses else 0

    @property
    def num_recorded(self) -> int:
        """The number of answers in the file."""
        return len(self._cassette)

    @contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Serve from a separate thread, for code without an event loop. Raises the errors of entering and leaving."""
        try:
            with entered_in_thread(self, "recorded-engine"):
                yield self
        except BaseException as error:
            if not isinstance(error, NotRecorded):
                self._report_misses(error)
            raise

    async def enter(self, stack: AsyncExitStack) -> None:
        """Open the file and start serving."""
        self.misses.clear()
        recording = await self._recording(stack)
        self._cassette = await asyncio.to_thread(Cassette, self._file, wraps=self._again, match=self._match)
        stack.callback(self._cassette.close)
        if not len(self._cassette) and recording is None:
            hint = "an exported run is replayed with: forebay start --replay FILE"
            raise NotRecorded(f"{self._file.name} has no engine calls", hint=hint)
        self._answers = ReplayAnswers(self._cassette, self._speed, recording, self._miss)
        await self.serve(stack, self._answers.answer)
        # Called before the server shuts down: the server waits for its connections, which wait for their answers.
        stack.callback(self._answers.state.stop)

    async def _recording(self, stack: AsyncExitStack) -> UpstreamRecording | None:
        """The recording that ``upstream`` adds to, or None."""
        is_new = self._record == "once" and not self._file.exists()
        if self._upstream is None and is_new:
            how = "to create it, pass upstream=URL or run pytest --record-engine URL"
            raise FileNotFoundError(f"there is no recording {str(self._file)!r:.200}: {how}")
        if self._upstream is None or (self._record == "once" and not is_new):
            return None
        if not is_new:
            open_file(self._file).close()  # raises if it does not exist; the writer would create it
        writer = await asyncio.to_thread(CallWriter, self._file)
        if is_new:  # a file without calls would be replayed next time
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

    def _report_misses(self, error: BaseException | None) -> None:
        """Raise ``NotRecorded`` for the misses, or add them as a note to ``error``."""
        if not self.misses:
            return
        count = "a call was" if self.num_misses == 1 else f"{self.num_misses:,} calls were"
        words = f"{count} not recorded; the first: {self.misses[0]}"
        if error is not None:
            error.add_note(words)
            return
        how = f"remove {self._file}" if self._record == "once" else "use forebay engine record"
        raise NotRecorded(words, hint=f"{how} to record again, or send the recorded requests")
