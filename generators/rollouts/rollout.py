"""One execution of a rollout function, with its identity and its recorded calls."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from forebay.core.ids import InstanceId, rollout_uid
from forebay.engines.capture.call_spans import num_sampled
from forebay.engines.capture.policy_calls import is_left_out
from forebay.engines.capture.sample_fields import Recorded
from forebay.engines.capture.turn import Turn
from forebay.generators.rollouts.chat_turn import ChatTurn
from forebay.generators.rollouts.engine_calls import CHAT_PATH, EngineCalls, headers_of
from forebay.generators.rollouts.open_group import OpenGroup
from forebay.telemetry.tracing.records import TurnSummary


class OpenStream(Protocol):
    """A stream that may not be read to its end."""

    async def stop_and_record(self) -> None:
        """Stop the call and record it."""


class StreamRecorder(Protocol):
    """Recorder of an open stream."""

    def drop(self) -> None:
        """Abort the stream at the engine without recording it."""


class Rollout:
    """The rollout that a rollout function finds as ``client.rollout``.

    ``extra_info`` is merged into the sample's ``extra_info``, and ``for_reward`` into the reward function's item; both
    take JSON values. Samples are made from ``trajectory``. It defaults to ``recorded``, the turns of the rollout's own
    engine calls, and the rollout function may replace it. Contexts entered into ``at_end`` are left after the reward.
    """

    def __init__(self, run_id: str, group: OpenGroup, slot: int, attempt: int, calls: EngineCalls) -> None:
        self.run_id = run_id
        self.uid = rollout_uid(run_id, group.group_id, slot)
        self.instance_id: InstanceId = group.row.instance_id
        self.row: dict[str, Any] = group.row.fields
        self.row_digest = group.row.digest
        self.prompt = group.row.prompt
        self.epoch = group.epoch
        self.slot = slot
        self.attempt = attempt
        self.rollout_id = f"{group.group_id}-{slot:04x}"
        self.extra_info: dict[str, Any] = {}
        self.for_reward: dict[str, Any] = {}
        self.at_end = AsyncExitStack()
        self.at_end.callback(self._drop_streams)
        self.recorded = calls.recorded
        self.trajectory: Recorded = self.recorded
        self.open_streams: dict[StreamRecorder, OpenStream] = {}
        """Streams that have not been read to their end."""
        self.num_sampled_tokens = 0
        """Tokens sampled by all calls so far, including aborted ones."""
        self.calls = calls
        self.trace = calls.trace
        """Trace of this execution."""
        self.num_turns = 0
        """Chats requested through the rollout's own client."""
        self.gateway_turns: Sequence[TurnSummary] = ()
        """Turns of an agent, as recorded by the gateway."""
        self._turn_lock = threading.Lock()
        group.note_rollout(slot, self)

    @property
    def model(self) -> str:
        """The name of the model that the engine serves."""
        return self.calls.target.model

    @property
    def engine_url(self) -> str:
        """URL of the current engine, without ``/v1``. Changes if the engine fails."""
        return self.calls.target.url

    def turn(self, options: Any) -> ChatTurn:
        """Return the turn that a call of the openai package begins."""
        if not options.url.endswith(CHAT_PATH):
            return ChatTurn()
        with self._turn_lock:
            number, self.num_turns = self.num_turns, self.num_turns + 1
        return ChatTurn(self.trace.turn(number))

    def count(self, turns: Iterable[Turn]) -> None:
        """Count the tokens sampled by one call."""
        number = sum(map(num_sampled, turns))
        self.num_sampled_tokens += number
        self.calls.cap.num_sampled += number

    def record(self, turns: Iterable[Turn], options: Any, *, num_merged: int = 0) -> None:
        """Record the finished turns of a call, merged from ``num_merged`` parts, unless ``options`` leave them out."""
        recorded = list(turns)
        if is_left_out(headers_of(options)):
            self.recorded.note("left_out", len(recorded))
            return
        self.calls.pool.notices.note(recorded, self.run_id)
        for turn in recorded:
            self.recorded.add(turn)
        self.recorded.note("merged", num_merged)

    async def end_streams(self) -> None:
        """Stop and record all streams that were not read to their end."""
        # In a loop: while one stream is ended, tasks of the rollout may begin another.
        while streams := list(self.open_streams.values()):
            for stream in streams:
                await stream.stop_and_record()

    def _drop_streams(self) -> None:
        # After a failed attempt, engines would otherwise keep generating.
        for recorder in list(self.open_streams):
            recorder.drop()
