"""Telling messages apart by digests: which conversation a call, a sample or a row belongs to."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.ids import InstanceId
from forebay.core.task_row import parse_row

_encode = msgspec.json.Encoder().encode

NUM_BYTES = 8


def digests(messages: Sequence[Any]) -> Iterator[int]:
    """A number for each beginning of a conversation: of one message, of two, and so on."""
    digest = b""
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
    """``1`` is not ``"1"``."""
    return int.from_bytes(blake2b(_encode(instance_id), digest_size=NUM_BYTES).digest(), "big")
