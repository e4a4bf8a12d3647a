"""The turns of one rollout as a tree of tokens: each node holds the tokens that its turn adds.

Images of one size have the same placeholder tokens, so a turn extends another only if its images begin with the
other's.
"""

import math
import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from forebay.engines.capture.read_rows import ROUTED
from forebay.engines.capture.side_rows import RowStretch
from forebay.engines.capture.turn import Turn

MEDIA = ("image_url", "image", "video_url", "video", "audio_url", "input_audio")
"""Types of the parts of a message that become placeholder tokens."""
MARGIN = 16
"""Tokens at the end of a prompt that may differ once the reply stands behind them."""


def as_ids(ids: Sequence[int]) -> "array[int]":
    """Copy ids into four bytes each (they are below 2^31), because long rollouts have millions of them."""
    return array("i", ids)


@dataclass(eq=False)
class Node:
    """One turn. ``kept`` tokens of its prompt belong to its ancestors; ``prompt`` holds the rest."""

    turn: Turn
    """Without its prompt and sampled ids, which the node holds."""
    parent: "Node | None"
    kept: int
    prompt: "array[int]"
    sampled: "array[int]"
    number: int
    """Position of the turn in the rollout, in the order of insertion."""
    media: list[Any]
    """The ``media_of`` its request."""
    alike: "tuple[Node, int] | None" = None
    """The node that shares most tokens with this one's prompt, and their number: it has the rows of these tokens."""
    children: "list[Node]" = field(default_factory=list)

    @property
    def sampled_start(self) -> int:
        """Position of the first sampled token in the whole sequence."""
        return self.kept + len(self.prompt)

    @property
    def end(self) -> int:
        """Length of the whole sequence."""
        return self.sampled_start + len(self.sampled)

    @property
    def logprobs(self) -> list[float]:
        """One logprob per sampled token; NaN if unknown or not requested."""
        known = self.turn.logprobs
        return [math.nan] * len(self.sampled) if known is None else known

    def path(self) -> "list[Node]":
        """Nodes from the root to this node."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def sequence(self) -> "array[int]":
        """All tokens: prompt, then sampled."""
        return self.prompt_ids() + self.sampled

    def prompt_ids(self) -> "array[int]":
        """All tokens before the sampled ones."""
        before: array[int] = array("i")
        for node in self.path():
            before = before[: node.kept] + node.prompt + (node.sampled if node is not self else array("i"))
        return before

    def _row_sources(self) -> "list[tuple[Node, int]]":
        """Nodes with rows of the whole sequence, in order, and the token where the rows of each end."""
        chain = [(self, self.end)]
        while (alike := chain[-1][0].alike) is not None:
            chain.append((alike[0], min(alike[1], chain[-1][1])))
        return chain[::-1]

    def stretches(self) -> dict[str, list[RowStretch]]:
        """Where the rows of the whole sequence are, by array.

        The first rows win: a token's row is from the call that sampled the next token, or that first read the token.
        """
        found: dict[str, list[RowStretch]] = {}
        known = 0
        for node, end in self._row_sources():
            # The row of the last known token came with the token after it, also if that is the first sampled one.
            first = max(known - 1, 0)
            for name, pieces in node.turn.arrays.items():
                rows = found.setdefault(name, [])
                if known == node.sampled_start and rows and pieces[0].start < known <= rows[-1].stop:
                    last = rows.pop()
                    rows += [last._replace(stop=first)] if last.start < first else []
                # A stream that its reader leaves may have a row for its last token. No token follows it here.
                last_end = min(end, self.end - 1) if name == ROUTED else end
                for piece in pieces:
                    start, stop = max(first, piece.start, rows[-1].stop if rows else 0), min(last_end, piece.end)
                    has_shape = not rows or rows[0].piece.shape == piece.shape
                    if start < stop and has_shape:
                        rows.append(RowStretch(piece, start, stop))
            known = end
        return {name: rows for name, rows in found.items() if rows}

    def whole_turn(self) -> Turn:
        """The recorded turn, including its ids."""
        ids: dict[str, Any] = {"prompt_ids": list(self.prompt_ids()), "sampled_ids": list(self.sampled)}
        return msgspec.structs.replace(self.turn, **ids)


class Match(NamedTuple):
    """How far a prompt matches the tree.

    ``whole`` is the deepest node whose tokens are all in the prompt. ``left`` is the node where the prompt diverges
    deepest among (or right before) the sampled tokens, at position ``left_at``.
    """

    whole: Node | None
    left: Node | None
    left_at: int
    furthest: tuple[Node, int] | None
    """The node of the same model that shares most tokens with the prompt, the oldest of equal ones; their number."""


def media_of(messages: Sequence[object]) -> list[Any]:
    """The images, videos and sounds of a request, in order."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part.get(part["type"]) for part in parts if isinstance(part, Mapping) and part.get("type") in MEDIA]


def match(roots: Sequence[Node], ids: "array[int]", turn: Turn) -> Match:
    """Compare the prompt ``ids`` of ``turn``, and its media, with every branch; the newest of equal matches wins."""
    whole: Node | None = None
    left: Node | None = None
    left_at = 0
    furthest: tuple[Node, int] | None = None
    # The newest wins: if a prompt was sent twice, the next turn continues the later answer.
    for node, at in _reached(roots, ids, media_of(turn.messages)):
        is_further = furthest is None or (at, furthest[0].number) > (furthest[1], node.number)
        if is_further and model_of(node.turn) == model_of(turn):
            furthest = node, at
        if at == node.end and (whole is None or (at, node.number) > (whole.end, whole.number)):
            whole = node
        elif (
            at < node.end and at >= node.sampled_start and (left is None or (at, node.number) > (left_at, left.number))
        ):
            left, left_at = node, at
    return Match(whole, left, left_at, furthest)


def _reached(roots: Sequence[Node], ids: "array[int]", media: Sequence[Any]) -> Iterator[tuple[Node, int]]:
    """Yield each node that ``ids`` reaches, with the position where ``ids`` diverges from it."""
    todo = list(roots)
    while todo:
        node = todo.pop()
        if media[: len(node.media)] != node.media:
            continue
        at = _leaves(node, ids)
        yield node, at
        todo += [child for child in node.children if child.kept <= at]


def _leaves(node: Node, ids: "array[int]") -> int:
    at = node.kept
    for part in (node.prompt, node.sampled):
        num_same = common(part, ids[at : at + len(part)])
        at += num_same
        if num_same < len(part):
            break
    return at


def common(one: "array[int]", other: "array[int]") -> int:
    """Return the length of the common prefix."""
    # Usually both are equal, and this comparison runs in C.
    if one == other:
        return len(one)
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def model_of(turn: Turn) -> tuple[str, str]:
    """The model and the adapter of a turn, whose rows are no other model's."""
    return turn.model, turn.adapter


def wanted_from(
    nodes: Sequence[Node], messages: Sequence[Mapping[str, Any]], model: tuple[str, str], *, has_replies: bool
) -> int:
    """Guess the first token without a row in the prompt of ``messages`` to a model, given as by ``model_of``.

    The newest turn that they continue has the rows before it. Messages are compared by identity: equal ones must be the
    same objects. ``has_replies`` is false if prompts do not repeat replies token for token: the guess then is the end
    of the turn's prompt.
    """
    for node in reversed([node for node in nodes if model_of(node.turn) == model]):
        known = node.turn.messages
        if len(known) <= len(messages) and all(map(operator.is_, known, messages)):
            following = messages[len(known) : len(known) + 1] if has_replies else []
            is_whole = any(_said(message) == _said(node.turn.reply) for message in following)
            # No call has returned the row of the last token yet.
            return max(0, node.end - 1 if is_whole else node.sampled_start - 1 - MARGIN)
    return 0


def _said(message: Mapping[str, Any]) -> list[object]:
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    return [message.get("content") or None, message.get("reasoning_content") or None, functions]
