"""The turns of one rollout as a tree of tokens: each node holds the tokens that its turn adds."""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from forebay.engines.capture.turn import Turn


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


def match(roots: Sequence[Node], ids: "array[int]") -> Match:
    """Compare ``ids`` with every branch; the newest of equal matches wins."""
    whole: Node | None = None
    left: Node | None = None
    left_at = 0
    # The newest wins: if a prompt was sent twice, the next turn continues the later answer.
    for node, at in _reached(roots, ids):
        if at == node.end and (whole is None or (at, node.number) > (whole.end, whole.number)):
            whole = node
        elif (
            at < node.end and at >= node.sampled_start and (left is None or (at, node.number) > (left_at, left.number))
        ):
            left, left_at = node, at
    return Match(whole, left, left_at)


def _reached(roots: Sequence[Node], ids: "array[int]") -> Iterator[tuple[Node, int]]:
    """Yield each node that ``ids`` reaches, with the position where ``ids`` diverges from it."""
    todo = list(roots)
    while todo:
        node = todo.pop()
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
