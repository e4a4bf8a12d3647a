"""Which conversation a call, a sample or a row of a captured run belongs to, found by digests of messages.

``RowPrompts`` knows the beginnings of conversations by instance; ``TurnStore`` keeps recorded turns by the conversation
that each ends, until a sample with the same messages takes them.
"""

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.core.ids import InstanceId
from forebay.core.task_row import parse_row
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn
from forebay.gateway.runs.captured_traces import Calls, CallSpans

Json = dict[str, Any]

NUM_BYTES = 8

_encode = msgspec.json.Encoder().encode


def digests(messages: Sequence[Any]) -> Iterator[int]:
    """A number for each beginning of a conversation: of one message, of two, and so on."""
    digest = b""
    # Each digest is made of the one before: all beginnings together cost no more than the whole.
    for message in messages:
        digest = blake2b(digest + _encode(_plain(message)), digest_size=NUM_BYTES).digest()
        yield int.from_bytes(digest, "big")


def beginnings(messages: object) -> set[int]:
    """Those of a call, also without the system messages that a generator may have put before a row's prompt."""
    if not isinstance(messages, list):
        return set()
    first = next((n for n, message in enumerate(messages) if _role(message) != "system"), 0)
    return {*digests(messages), *digests(messages[first:])}


def _plain(message: object) -> list[Any]:
    """What makes two messages the same: blanks around a text, ids and fields without a value do not count."""
    if not isinstance(message, Mapping):
        return [message]
    calls = message.get("tool_calls")
    functions = [call.get("function") if isinstance(call, Mapping) else call for call in calls or ()]
    return [_role(message), _text(message.get("content")), functions]


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def _text(content: object) -> object:
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    return content.strip() if isinstance(content, str) else content or ""


class RowPrompts:
    """The prompt of every instance of an input file, in 16 bytes each."""

    def __init__(self, path: Path) -> None:
        """Reads the file; lines that are no rows are left out. Raises ``OSError``."""
        # Two arrays and a binary search: a dict of a million rows would take ten times as much.
        pairs = sorted(_pairs(path))
        self._instances = array("Q", (instance for instance, _ in pairs))
        self._prompts = array("Q", (prompt for _, prompt in pairs))

    def of(self, instance_id: InstanceId) -> int | None:
        """The digest of its prompt; None for an instance that the file has not."""
        wanted = _instance(instance_id)
        at = bisect_left(self._instances, wanted)
        return self._prompts[at] if at < len(self._instances) and self._instances[at] == wanted else None


def _pairs(path: Path) -> Iterator[tuple[int, int]]:
    with path.open("rb") as file:
        for number, line in enumerate(file):
            try:
                row = parse_row(line, number)
            except ValueError:
                continue
            *_, prompt = digests(row.prompt)
            yield _instance(row.instance_id), prompt


def _instance(instance_id: InstanceId) -> int:
    # As JSON, in which ``1`` is not ``"1"``.
    return int.from_bytes(blake2b(_encode(instance_id), digest_size=NUM_BYTES).digest(), "big")


class _Kept(msgspec.Struct, eq=False):
    turn: Turn
    call: CallSpans | None
    """The spans of the call that brought it."""
    place: int
    """The digest of its messages with the reply at their end."""
    until_s: float


class Taken(NamedTuple):
    """The fields that the turns of a conversation give a sample of its tokens, and the calls that brought them."""

    fields: Json
    calls: Calls


class TurnStore:
    """Turns until a sample takes them, or they are too old. ``now_s`` grows from call to call."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._by_place: dict[int, list[_Kept]] = defaultdict(list)
        self._by_age: dict[_Kept, None] = {}
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, turn: Turn, now_s: float, call: CallSpans | None = None) -> None:
        """Keep a turn."""
        # The digest of the whole conversation stands for it: a sample's messages up to a reply have the same.
        *_, place = digests([*turn.messages, turn.reply])
        kept = _Kept(turn, call, place, now_s + self._keep_s)
        self._by_place[place].append(kept)
        self._by_age[kept] = None
        self._forget(now_s)

    def take(self, messages: object) -> Taken | None:
        """What the turns of a conversation say of its sample; they are kept no longer.

        None if its last assistant message is no reply that was recorded.
        """
        turns = self._turns_of(messages) if isinstance(messages, list) else []
        if not turns:
            return None
        trajectory = Trajectory()
        for kept in turns:
            trajectory.add(kept.turn)
            self._drop(kept)
        calls = [(kept.call, kept.turn) for kept in turns if kept.call is not None]
        return Taken(trajectory.samples()[-1].fields(), calls)

    def _turns_of(self, messages: Sequence[Any]) -> list[_Kept]:
        replies = [
            place
            for place, message in zip(digests(messages), messages, strict=True)
            if isinstance(message, dict) and message.get("role") == "assistant"
        ]
        if not replies or replies[-1] not in self._by_place:
            return []
        # Backwards: of several turns with the same messages, that one counts whose tokens the next turn goes on from.
        chosen: list[_Kept] = []
        for place in reversed(replies):
            if kept := self._by_place.get(place):
                chosen.append(_best(kept, chosen[-1].turn if chosen else None))
        return chosen[::-1]

    def _drop(self, kept: _Kept) -> None:
        del self._by_age[kept]
        others = self._by_place[kept.place]
        others.remove(kept)
        if not others:
            del self._by_place[kept.place]

    def _forget(self, now_s: float) -> None:
        while (oldest := next(iter(self._by_age), None)) is not None and oldest.until_s <= now_s:
            self._drop(oldest)
            _release(oldest)


def _release(kept: _Kept) -> None:
    if kept.call is not None:
        kept.call.release()


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
