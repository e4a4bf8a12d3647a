"""Collects the turns of one rollout and makes samples from them."""

import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from forebay.core.starts.asked_arrays import NO_ARRAYS, AskedArrays
from forebay.engines.capture.policy_calls import asked, noted_names
from forebay.engines.capture.read_reply import objects
from forebay.engines.capture.read_rows import ROUTED
from forebay.engines.capture.request_fields import ROUTED_START, asking_rows
from forebay.engines.capture.sample_fields import CapturedSample, sample_of, sample_without_tokens
from forebay.engines.capture.sampling_params import TRUNCATIONS
from forebay.engines.capture.side_rows import PartWriter, RowSpool
from forebay.engines.capture.token_tree import Match, Node, as_ids, match, media_of, wanted_from
from forebay.engines.capture.turn import ABORTED, Turn, continues, merge

Object = dict[str, Any]


logger = logging.getLogger(__name__)


class Drift(StrEnum):
    """How the prompt of a turn relates to the known tokens."""

    CLEAN = "clean"
    """It begins with all tokens of an earlier turn, or repeats a prompt, or is the first."""
    REALIGNED = "realigned"
    """It diverges in the second half of the last response; tokens after that point are not trained on."""
    FORK = "forked"
    """It diverges elsewhere and becomes another sample of the same rollout."""
    UNTOLD = "untold"
    """The engine returned no token ids."""


class Trajectory:
    """Collects the turns of one rollout and makes samples from them. Thread-safe.

    Turns form a tree of tokens, and every leaf is a sample. A sampled token is trained on in one sample, or in none if
    realignment dropped it. Turns are ordered by when they began (``began_s``), not by when they were added: a stream
    that is not read to its end is added late. ``counters``:

    - ``clean``, ``realigned``, ``forked``, ``untold``: turns by their ``Drift``;
    - ``realigned_tokens``: sampled tokens dropped by realignment, not trained on;
    - ``branched``: clean turns that are another answer to the same tokens, as with ``n`` choices;
    - ``merged``: turns joined to the aborted turn that they continue;
    - ``aborted``, ``aborted_tokens``: aborted turns that were never continued, which are in no sample;
    - ``unscored_tokens``: sampled tokens without a logprob, not trained on;
    - ``unrouted_tokens``: tokens of samples without the row of routed experts that was asked for;
    - ``unmasked_tokens``: tokens sampled with top-k or the like, without the mask that was asked for;
    - ``rerouted_tokens``: rows that were dropped, because a weight update made the engine compute them again;
    - ``other_models``: turns of models other than the policy, whose tokens are not trained on;
    - ``left_out``: turns that the caller excluded.
    """

    def __init__(self, name: str = "", *, arrays: AskedArrays = NO_ARRAYS) -> None:
        """``arrays`` are those that engines are asked for."""
        self._arrays = arrays
        self._counts: Counter[str] = Counter()
        self._name = name
        self._roots: list[Node] = []
        self._nodes: list[Node] = []
        self._added: list[Node | Turn] = []
        """A turn without ids has no node."""
        self._messages = SharedMessages()
        self._rows = RowSpool()
        self._has_replies = True
        """Whether prompts repeat the replies before them token for token, as far as is known."""
        self._is_refused = False
        self._num_added = 0
        self._lock = threading.Lock()

    def add(self, turn: Turn) -> Drift:
        """Add a turn, joining it to the previous turn if it continues an abort. Returns the drift of its prompt."""
        with self._lock:
            drift = self._add(self._messages.shared(turn))
        if drift in {Drift.REALIGNED, Drift.FORK}:
            logger.debug("rollout %s, turn %d: %s (%s)", self._name, self._num_added, drift, dict(self._counts))
        return drift

    def note(self, counter: str, number: int) -> None:
        """Count events that precede ``add``: parts that were ``merged``, turns that were ``left_out``."""
        with self._lock:
            self._counts[counter] += number

    @property
    def counters(self) -> Counter[str]:
        """Counts of events so far, by name."""
        with self._lock:
            self._sort()
            return self._counts + self._lost()

    def asking_rows(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that ask for rows in the chat ``body``: of tokens that have none yet, as far as known."""
        # A call that continues from ids begins where the known rows end.
        first = len(given) - 1 if (given := body.get("input_ids")) else 0
        if self._arrays.routed_experts and not given:
            with self._lock:
                asks_all, self._is_refused = self._is_refused, False
                messages = self._messages.copies(objects(body.get("messages")))
                model = (named := asked(body))["model"], named["adapter"]
                first = 0 if asks_all else wanted_from(self._nodes, messages, model, has_replies=self._has_replies)
        return asking_rows(body, self._arrays, first)

    def is_refusal(self, sent: Mapping[str, Any], message: str) -> bool:
        """Whether an engine refused ``sent`` because its prompt ends before the guess. The next call asks for all."""
        if not self._arrays.routed_experts or not sent.get(ROUTED_START) or ROUTED_START not in message:
            return False
        self._has_replies, self._is_refused = False, True
        return True

    def gap_before(self, turn: Turn) -> int | None:
        """The first token of a turn that has no row, if it was before the guess for its request; otherwise None."""
        own = turn.arrays.get(ROUTED)
        # Rows that were dropped must not come back: the engine has only those of the new weights.
        if not own or turn.prompt_ids is None or turn.num_rerouted:
            return None
        with self._lock:
            found = match(self._roots, as_ids(turn.prompt_ids), turn).furthest
            first = max(0, found[1] - 1) if found is not None else 0
        return first if first < own[0].start else None

    def turns(self) -> list[Turn]:
        """Return every turn, the newest last. Adding them to a trajectory in this order yields the same samples."""
        with self._lock:
            self._sort()
            turns = map(_whole, self._added)
            return [msgspec.structs.replace(turn, arrays=self._rows.whole(turn.arrays)) for turn in turns]

    def sample_fields(self) -> list[dict[str, Any]]:
        """Return the fields of each of ``samples``."""
        return [sample.fields() for sample in self.samples()]

    def samples(self, *, has_rows: bool = True) -> list[CapturedSample]:
        """Return a sample for every leaf: forks in the order of their turns, then the main sample with the newest turn.

        The main sample ends with a turn of the policy if there is one. If any turn has no ids, there is one sample
        without tokens. No turns, no samples. Without ``has_rows`` they have no parts and arrays.
        """
        with self._lock:
            if not self._added:
                return []
            self._sort()
            newest, turns = _newest(self._added), list(map(_bare, self._added))
            if isinstance(newest, Node) and len(self._nodes) == len(self._added):
                *forks, main = self._samples_from(newest, has_rows=has_rows)
            else:
                *forks, main = [sample_without_tokens([turn for turn in turns if turn.is_policys] or turns)]
            return [*forks, msgspec.structs.replace(main, asked_models=noted_names(turns))]

    def _sort(self) -> None:
        """Rebuild the tree if turns were added in another order than they began in."""
        began = [_bare(added).began_s for added in self._added]
        if all(earlier <= later for earlier, later in pairwise(began)):
            return
        turns = sorted(map(_whole, self._added), key=lambda turn: turn.began_s)
        self._counts = Counter({name: self._counts[name] for name in ("merged", "left_out")})
        self._num_added = 0
        for known in (self._roots, self._nodes, self._added):
            known.clear()
        for turn in turns:
            self._add(turn)

    def _samples_from(self, newest: Node, *, has_rows: bool) -> list[CapturedSample]:
        claimed: dict[Node, int] = {}
        # The main sample goes first, so that it trains on sampled tokens that branches share.
        main, *forks = [(leaf, sample_of(leaf, claimed)) for leaf in self._leaves(newest)]
        forks = [(leaf, fork) for leaf, fork in forks if any(fork.loss_mask or ()) or not leaf.turn.is_policys]
        return self._with_rows([*forks, main]) if has_rows else [sample for _, sample in (*forks, main)]

    def _leaves(self, newest: Node) -> list[Node]:
        """The last nodes of all samples, that of the main one first."""
        kept = self._kept()
        inner = {newest, *(node.parent for node in kept)}
        return [newest, *(node for node in kept if node not in inner)]

    def _with_rows(self, leaves: Sequence[tuple[Node, CapturedSample]]) -> list[CapturedSample]:
        """Add what the engine returned beside the tokens."""
        rows = {leaf: leaf.stretches() for leaf, _ in leaves}
        writer = PartWriter(self._rows, list(rows.values()))
        # From the main sample on, whose part then has all of its rows.
        made = [msgspec.structs.replace(sample, rows=writer.fields(rows[leaf])) for leaf, sample in reversed(leaves)]
        return made[::-1]

    def _kept(self) -> list[Node]:
        """All nodes except aborted turns that were never continued; the newest node is always kept."""
        newest = _newest(self._nodes)
        return [node for node in self._nodes if node is newest or not _is_abandoned(node)]

    def _lost(self) -> Counter[str]:
        """Count tokens that are in no sample: never continued, or diverged from."""
        kept = self._kept()
        reached: dict[Node, int] = {}
        for node in kept:
            if node.parent is not None:
                reached[node.parent] = max(reached.get(node.parent, 0), node.kept)
        given_up = [node for node in self._nodes if node not in kept]
        return Counter(
            realigned_tokens=sum(node.end - at for node, at in reached.items()),
            aborted=len(given_up),
            aborted_tokens=sum(len(node.sampled) for node in given_up),
            unscored_tokens=_num_unscored(kept),
            unrouted_tokens=self._num_unrouted(),
            unmasked_tokens=sum(map(_num_unmasked, kept)) if self._arrays.sampling_mask else 0,
            rerouted_tokens=sum(node.turn.num_rerouted for node in self._nodes),
            other_models=sum(not _bare(added).is_policys for added in self._added),
        )

    def _num_unrouted(self) -> int:
        newest = _newest(self._nodes)
        if not self._arrays.routed_experts or not isinstance(newest, Node):
            return 0
        leaves = self._leaves(newest)
        routed = [stretch for leaf in leaves for stretch in leaf.stretches().get(ROUTED, ())]
        # The last token has no row, because no token follows it.
        return sum(leaf.end - 1 for leaf in leaves) - sum(stretch.stop - stretch.start for stretch in routed)

    def _add(self, turn: Turn) -> Drift:
        self._num_added += 1
        if turn.prompt_ids is None or turn.sampled_ids is None:
            self._added.append(turn)
            self._counts["untold"] += 1
            return Drift.UNTOLD
        newest = self._added[-1] if self._added else None
        if isinstance(newest, Node) and _is_abandoned(newest) and continues(first := newest.whole_turn(), turn):
            whole = merge(first, turn)  # it has the same prompt
            newest.turn, newest.sampled = self._stored(whole), as_ids(whole.sampled_ids or ())
            self._counts["merged"] += 1
            return Drift.CLEAN
        ids = as_ids(turn.prompt_ids)
        found = match(self._roots, ids, turn)
        prefix = self._prefix(found, len(ids))
        self._counts += prefix.counts
        new, sampled = ids[prefix.kept :], as_ids(turn.sampled_ids)
        media, number = media_of(turn.messages), self._num_added
        node = Node(self._stored(turn), prefix.parent, prefix.kept, new, sampled, number, media, found.furthest)
        siblings = self._roots if prefix.parent is None else prefix.parent.children
        for nodes in (siblings, self._nodes, self._added):
            nodes.append(node)
        return prefix.drift

    def _stored(self, turn: Turn) -> Turn:
        """Return the turn of a node, which stores its ids in less memory, with its rows in the file."""
        return msgspec.structs.replace(turn, prompt_ids=None, sampled_ids=None, arrays=self._rows.keep(turn.arrays))

    def _prefix(self, found: Match, num_tokens: int) -> "PrefixMatch":
        whole, left, left_at, _ = found
        end = 0 if whole is None else whole.end
        if left is not None and (whole is None or left_at > end):
            # A repeated prompt: this turn is another answer to it.
            if left_at == num_tokens == left.sampled_start:
                return PrefixMatch(left.parent, left.kept, Drift.CLEAN, is_branch=True)
            # Realign only if at most half of the last response is dropped; otherwise fork, which drops nothing.
            if not left.children and 2 * (left.end - left_at) <= len(left.sampled):
                return PrefixMatch(left, left_at, Drift.REALIGNED)
        elif whole is not None or not self._nodes:
            return PrefixMatch(whole, end, Drift.CLEAN, is_branch=whole is not None and bool(whole.children))
        return PrefixMatch(whole, end, Drift.FORK)


def _num_unscored(nodes: Sequence[Node]) -> int:
    # If no turn has logprobs, none were requested: the trainer computes its own.
    if all(node.turn.logprobs is None for node in nodes):
        return 0
    return sum(math.isnan(value) for node in nodes for value in node.logprobs)


def _num_unmasked(node: Node) -> int:
    num_cut = sum(span.end - span.start for span in node.turn.sampling if TRUNCATIONS & span.sampling.keys())
    return max(0, num_cut - sum(piece.end - piece.start for piece in node.turn.arrays.get("sampling_mask", ())))


class PrefixMatch(NamedTuple):
    """The node that a prompt extends, and the number of tokens it reuses."""

    parent: Node | None
    kept: int
    drift: Drift
    is_branch: bool = False

    @property
    def counts(self) -> Counter[str]:
        return Counter({self.drift.value: 1, "branched": int(self.is_branch)})


def _newest(added: Sequence[Node | Turn]) -> Node | Turn | None:
    """Return the turn that ends the main sample: the newest of the policy, otherwise the newest."""
    return next((each for each in reversed(added) if _bare(each).is_policys), next(reversed(added), None))


def _bare(added: Node | Turn) -> Turn:
    return added.turn if isinstance(added, Node) else added


def _whole(added: Node | Turn) -> Turn:
    return added.whole_turn() if isinstance(added, Node) else added


def _is_abandoned(node: Node) -> bool:
    return node.turn.finish_reason == ABORTED and not node.children


class SharedMessages:
    """Stores one copy of every message and tool, however many turns send it. The copies must not be changed."""

    def __init__(self) -> None:
        self._copy_by_json: dict[bytes, Object] = {}

    def shared(self, turn: Turn) -> Turn:
        """Return ``turn`` with its own copies, so that later changes by the caller do not affect it."""
        messages, tools = self.copies(turn.messages), self.copies(turn.tools)
        return msgspec.structs.replace(turn, messages=messages, tools=tools, reply=_copy(turn.reply))

    def copies(self, objects: Sequence[Mapping[str, Any]]) -> list[Object]:
        """Return the stored copy of each message or tool."""
        # Keyed by JSON: a rollout function may change a message in place before it sends it again.
        encoded = (msgspec.json.encode(each, enc_hook=_plain) for each in objects)
        return [self._copy_by_json.setdefault(key, msgspec.json.decode(key)) for key in encoded]


def _copy(message: Mapping[str, Any]) -> Object:
    return msgspec.json.decode(msgspec.json.encode(message, enc_hook=_plain), type=Object)


def _plain(value: Any) -> object:
    """Convert messages of the openai package, which users put into the next request."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(exclude_none=True, warnings=False)
    raise TypeError(f"{type(value).__name__} is not a JSON value")
