"""Finding the recorded turns that a sample was made of."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn
from forebay.server.gateway.prompts import digests

Json = dict[str, Any]


class _Kept(msgspec.Struct, eq=False):
    turn: Turn
    place: int
    """The digest of its messages with the reply at their end."""
    until_s: float


class TurnStore:
    """Turns until a sample takes them, or they are too old. ``now_s`` grows from call to call."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._by_place: dict[int, list[_Kept]] = defaultdict(list)
        self._by_age: dict[_Kept, None] = {}

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, turn: Turn, now_s: float) -> None:
        """Keep a turn."""
        *_, place = digests([*turn.messages, turn.reply])
        kept = _Kept(turn, place, now_s + self._keep_s)
        self._by_place[place].append(kept)
        self._by_age[kept] = None
        self._forget(now_s)

    def take(self, messages: object) -> Json | None:
        """What the turns of a conversation tell of its tokens; they are kept no longer.

        None if its last assistant message is no reply that was recorded.
        """
        turns = self._turns_of(messages) if isinstance(messages, list) else []
        if not turns:
            return None
        trajectory = Trajectory()
        for kept in turns:
            trajectory.add(kept.turn)
            self._drop(kept)
        return trajectory.samples()[-1].fields()

    def _turns_of(self, messages: Sequence[Any]) -> list[_Kept]:
        """The newest first to be chosen, so that each one before can be the one whose tokens it goes on from."""
        replies = [
            place
            for place, message in zip(digests(messages), messages, strict=True)
            if isinstance(message, dict) and message.get("role") == "assistant"
        ]
        if not replies or replies[-1] not in self._by_place:
            return []
        chosen: list[_Kept] = []
        for place in reversed(replies):
            if kept := self._by_place.get(place):
                chosen.append(_best(kept, chosen[-1].turn if chosen else None))
        return chosen[::-1]

    def _drop(self, kept: _Kept) -> None:
        del self._by_age[kept]
        held = self._by_place[kept.place]
        held.remove(kept)
        if not held:
            del self._by_place[kept.place]

    def _forget(self, now_s: float) -> None:
        while (oldest := next(iter(self._by_age), None)) is not None and oldest.until_s <= now_s:
            self._drop(oldest)


def _best(kept: Sequence[_Kept], following: Turn | None) -> _Kept:
    """One whose tokens the following turn's prompt goes on from, else the oldest."""
    if following is None or following.prompt_ids is None:
        return kept[0]
    prompt = following.prompt_ids
    return next((each for each in kept if _is_before(each.turn, prompt)), kept[0])


def _is_before(turn: Turn, prompt_ids: Sequence[int]) -> bool:
    if turn.prompt_ids is None or turn.sampled_ids is None:
        return False
    tokens = [*turn.prompt_ids, *turn.sampled_ids]
    return list(prompt_ids[: len(tokens)]) == tokens
