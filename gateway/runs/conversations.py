"""Find the conversation that a call, a sample or a row of a captured run belongs to, by digests of messages.

``RowPrompts`` maps instances to the beginnings of conversations. ``TurnStore`` keeps recorded turns, keyed by the
conversation that each ends, until a sample with the same messages takes them.
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

_encode = msgspec.json.Encoder(order="deterministic").encode  # clients change the order of fields


def digests(messages: Sequence[Any]) -> Iterator[int]:
    """Yield a digest of each prefix of a conversation: of one message, of two, and so on."""
    digest = b""
    # Each digest extends the previous one, so all prefixes together cost no more than the whole.
    for message in messages:
        digest = blake2b(digest + _encode(_plain(message)), digest_size=NUM_BYTES).digest()
        yield int.from_bytes(digest, "big")


def beginnings(messages: object) -> set[int]:
    """Return the prefixes of a call, with and without system messages that a generator may have prepended."""
    if not isinstance(messages, list):
        return set()
    first = next((n for n, message in enumerate(messages) if _role(message) != "system"), 0)
    return {*digests(messages), *digests(messages[first:])}


def _plain(message: object) -> list[Any]:
    """Return the identity of a message: surrounding whitespace, ids and empty fields do not count."""
    if not isinstance(message, Mapping):
        return [message]
    calls = message.get("tool_calls")
    listed = calls if isinstance(calls, list) else []
    functions = [call.get("function") if isinstance(call, Mapping) else call for call in listed]
    return [_role(message), visible_text(message.get("content")), functions]


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def visible_text(content: object) -> object:
    """Return the text of a message without the whitespace around it; other content unchanged."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    return content.strip() if isinstance(content, str) else content or ""


class RowPrompts:
    """The prompts of all instances of an input file, in 16 bytes each."""

    def __init__(self, path: Path) -> None:
        """Read the file, skipping invalid lines. Raises ``OSError``."""
        # Two arrays and a binary search: a dict of a million rows would take ten times the memory.
        pairs = sorted(_pairs(path))
        self._instances = array("Q", (instance for instance, _ in pairs))
        self._prompts = array("Q", (prompt for _, prompt in pairs))

    def of(self, instance_id: InstanceId) -> int | None:
        """Return the digest of the instance's prompt; None if the file lacks the instance."""
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
    # Encoded as JSON, in which ``1`` differs from ``"1"``.
    return int.from_bytes(blake2b(_encode(instance_id), digest_size=NUM_BYTES).digest(), "big")


class _Kept(msgspec.Struct, eq=False):
    turn: Turn
    call: CallSpans | None
    """The spans of its call."""
    place: int
    """The digest of its messages including the reply."""
    until_s: float


class Taken(NamedTuple):
    """Token fields for a sample from the turns of a conversation, and the calls of these turns."""

    fields: Json
    calls: Calls


class TurnStore:
    """Keeps turns until a sample takes them or they are too old. ``now_s`` must not decrease between calls."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._by_place: dict[int, list[_Kept]] = defaultdict(list)
        self._by_age: dict[_Kept, None] = {}
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, turn: Turn, now_s: float, call: CallSpans | None = None) -> None:
        """Store a turn."""
        # Keyed by the digest of the whole conversation, which a sample's messages up to the reply share.
        *_, place = digests([*turn.messages, turn.reply])
        kept = _Kept(turn, call, place, now_s + self._keep_s)
        self._by_place[place].append(kept)
        self._by_age[kept] = None
        self._forget(now_s)

    def take(self, messages: object) -> Taken | None:
        """Remove the turns of a conversation and return their token fields for its sample.

        None if its last assistant message is not a recorded reply.
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
        # Backwards: of several turns with equal messages, choose the one whose tokens the next turn continues.
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
    """Return the turn whose tokens the following prompt continues, otherwise the oldest."""
    if following is None or following.prompt_ids is None:
        return kept[0]
    prompt = following.prompt_ids
    return next((each for each in kept if _is_before(each.turn, prompt)), kept[0])


def _is_before(turn: Turn, prompt_ids: Sequence[int]) -> bool:
    if turn.prompt_ids is None or turn.sampled_ids is None:
        return False
    tokens = [*turn.prompt_ids, *turn.sampled_ids]
    return list(prompt_ids[: len(tokens)]) == tokens
