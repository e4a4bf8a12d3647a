"""One execution of a rollout function: what it knows about itself, and what is recorded of it."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from forebay.core.ids import InstanceId, rollout_uid
from forebay.engines.capture.call_spans import num_sampled
from forebay.engines.capture.policy_calls import is_left_out
from forebay.engines.capture.sample_fields import Recorded
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn
from forebay.generators.rollouts.chat_turn import ChatTurn
from forebay.generators.rollouts.engine_calls import CHAT_PATH, EngineCalls, headers_of
from forebay.generators.rollouts.open_group import OpenGroup
from forebay.telemetry.tracing.records import TurnSummary


class OpenStream(Protocol):
    """A stream that may not have been read to its end."""

    async def stop_and_record(self) -> None:
        """Stop the call, and record it."""


class StreamRecorder(Protocol):
    """What records such a stream."""

    def drop(self) -> None:
        """Nobody asks what the stream told: its engine is told to stop."""


class Rollout:
    """What a rollout function finds as ``client.rollout``.

    Whatever it puts into ``extra_info`` becomes part of its sample's ``extra_info``, and ``for_reward`` part of what
    the reward function is given; both take JSON values. ``trajectory`` is what its samples are made of: ``recorded``,
    the turns of its own engine calls, unless the rollout function puts something else there. What is entered into
    ``at_end`` is left when the rollout is over, after its reward.
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
        self.recorded = Trajectory(self.rollout_id)
        self.trajectory: Recorded = self.recorded
        self.open_streams: dict[StreamRecorder, OpenStream] = {}
        """Those that were not read to their end."""
        self.num_sampled_tokens = 0
        """By all its calls so far, those that were aborted included."""
        self.calls = calls
        self.trace = calls.trace
        """Where the time of this execution is recorded."""
        self.num_turns = 0
        """Chats that its own client was asked for."""
        self.gateway_turns: Sequence[TurnSummary] = ()
        """Those of an agent, as the gateway has recorded them."""
        self._turn_lock = threading.Lock()
        group.note_rollout(slot, self)

    @property
    def model(self) -> str:
        """The name of the model that the engine serves."""
        return self.calls.target.model

    @property
    def engine_url(self) -> str:
        """The engine that this rollout talks to, without ``/v1``; another one after it failed."""
        return self.calls.target.url

    def turn(self, options: Any) -> ChatTurn:
        """The turn that a call of the openai package begins."""
        if not options.url.endswith(CHAT_PATH):
            return ChatTurn()
        with self._turn_lock:
            number, self.num_turns = self.num_turns, self.num_turns + 1
        return ChatTurn(self.trace.turn(number))

    def count(self, turns: Iterable[Turn]) -> None:
        """Count the tokens that one call has sampled."""
        number = sum(map(num_sampled, turns))
        self.num_sampled_tokens += number
        self.calls.cap.num_sampled += number

    def record(self, turns: Iterable[Turn], options: Any, *, num_merged: int = 0) -> None:
        """Take in the finished turns of a call, unless its ``options`` leave it out; they had ``num_merged`` parts."""
        recorded = list(turns)
        if is_left_out(headers_of(options)):
            self.recorded.note("left_out", len(recorded))
            return
        self.calls.notices.note(recorded, self.run_id)
        for turn in recorded:
            self.recorded.add(turn)
        self.recorded.note("merged", num_merged)

    async def end_streams(self) -> None:
        """Return when every call is recorded: streams that are not read to their end are stopped."""
        # Until there is none: while one is ended, tasks of the rollout may begin another.
        while streams := list(self.open_streams.values()):
            for stream in streams:
                await stream.stop_and_record()

    def _drop_streams(self) -> None:
        # Those of an attempt that failed: their engines would go on for nobody.
        for recorder in list(self.open_streams):
            recorder.drop()
