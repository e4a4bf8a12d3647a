"""Cache keys for engine calls, so that no call silently uses cache entries computed by other weights.

SGLang shares its prefix cache only among calls with the same ``extra_key``, and in-place weight updates do not clear
it. So a key must always stand for the same weights. Keys are random and made here. A key is used until new weights are
announced or the engine reports another name for its weights. A call in flight during an update used its old key:
``judged`` marks it, unless all its tokens certainly come from one policy.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import msgspec

from forebay.core.tasks import TaskSet
from forebay.core.weight_versions import AnnouncedWeights, number_of
from forebay.engines.capture.turn import Turn, VersionSpan, merged

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
SEPARATOR = "."
"""Separates our key from the caller's own ``extra_key``, which partitions the cache further. vLLM refuses "/"."""


@dataclass(eq=False, slots=True)
class CacheKey:
    """Cache namespace of calls to the engine at ``url``. ``text`` is the value sent to the engine."""

    text: str
    url: str
    weights: AnnouncedWeights | None
    """The weights announced when the key was made; None if no trainer announces weights."""
    engine_name: str | None
    """The engine's name for its weights before the first call; None if it does not report one."""
    is_first: bool = True
    """Whether this is the engine's first key since that announcement."""
    is_over: bool = False
    """Whether the engine has since reported other weights."""

    def beside(self, own: object) -> str:
        """Return the ``extra_key`` of a call whose caller set its ``own``."""
        return self.text if own is None else f"{self.text}{SEPARATOR}{own}"


class CacheKeys:
    """Cache keys of a run, one current key per engine. ``name_at`` asks an engine for the name of its weights."""

    def __init__(self, name_at: Callable[[str], Awaitable[str | None]]) -> None:
        self._name_at = name_at
        self._weights: AnnouncedWeights | None = None
        self._current: dict[str, CacheKey] = {}
        self._remembered: dict[str, CacheKey] = {}
        self._lock = threading.Lock()
        self._keyed: set[str] = set()
        """Engines that have had a key since the last announcement."""
        self._tasks = TaskSet()
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Cancel pending requests to engines."""
        await self._tasks.cancel()

    def announce(self, weights: AnnouncedWeights | None) -> None:
        """Record the trainer's latest announcement. Repeated announcements are ignored."""
        before = self._weights
        if before is not None and weights is not None and weights.id == before.id:
            return
        self._weights = weights
        if before is None:
            # Calls sent before a resumed run's first announcement used the weights that it announces.
            for key in self._remembered.values():
                key.weights = weights
        else:
            self._current.clear()
            self._keyed.clear()

    def forget(self, url: str) -> None:
        """Drop the key of an engine that failed: it may return with other weights."""
        self._current.pop(url, None)

    def has(self, url: str) -> bool:
        """Whether the engine at ``url`` has a key, so that ``prepare`` need not be awaited."""
        return url in self._current

    async def prepare(self, url: str) -> None:
        """Make sure the engine at ``url`` has a key. Engine failures never raise."""
        while url not in self._current:
            if url not in self._asking:
                self._asking[url] = self._tasks.start(self._make(url))
            await asyncio.shield(self._asking[url])  # others wait for it too: this caller may be cancelled

    def of(self, url: str) -> CacheKey:
        """Return the key for a call to the engine at ``url``; a key for this call only if none is prepared."""
        return self._current.get(url) or self._new(url, None)

    def sent(self, extra_key: object) -> CacheKey | None:
        """Return the key that a call was sent with."""
        return self._remembered.get(str(extra_key).partition(SEPARATOR)[0])

    async def _make(self, url: str) -> None:
        weights = self._weights
        try:
            name = await self._name_at(url)
        finally:
            del self._asking[url]
        # Otherwise the name may belong to the previous weights: `prepare` asks again.
        if weights is self._weights:
            self._current[url] = self._new(url, name)
            self._keyed.add(url)

    def _new(self, url: str, name: str | None) -> CacheKey:
        key = CacheKey(secrets.token_hex(8), url, self._weights, name, is_first=url not in self._keyed)
        with self._lock:  # rollouts in threads make keys as well
            self._remembered[key.text] = key
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        return key

    # --- results of calls

    def judged(self, key: CacheKey, turns: Iterable[Turn]) -> list[Turn]:
        """Return the turns of a call, marked if other weights may have filled its cache, with numeric versions.

        Weights without a numeric name get the version announced last when the call was sent, or version 0 before the
        first announcement.
        """
        return [self._judged(key, turn) for turn in turns]

    def _judged(self, key: CacheKey, turn: Turn) -> Turn:
        weights = self._weights
        if weights is None or key.weights is None:
            # No trainer announces: assume that an unannounced weight update clears the cache.
            self._has_others(key, _names(turn))
            return turn
        is_mixed = turn.is_kv_mixed or self._is_mixed(key, key.weights, weights, _names(turn))
        return msgspec.structs.replace(_numbered(key, key.weights, weights, turn), is_kv_mixed=is_mixed)

    def _is_mixed(self, key: CacheKey, sent: AnnouncedWeights, now: AnnouncedWeights, names: set[str]) -> bool:
        """Whether a call sent under ``sent`` may have used cache entries of weights other than ``names``."""
        # Every announcement since the call was sent cleared the caches.
        if sent.id != now.id and now.last_kept <= sent.number:
            return False
        if self._has_others(key, names) or key.is_over:
            return True
        if key.engine_name is None and len(names) == 1:
            (key.engine_name,) = names  # the engine did not report a name before the first call
        return sent.id != now.id and not (names and self._shows(key, sent, now))

    def _shows(self, key: CacheKey, sent: AnnouncedWeights, now: AnnouncedWeights) -> bool:
        """Whether the engine's name for the current weights is known to differ from its name for the previous ones."""
        if key.engine_name is None or now.number != sent.number + 1:
            return False
        # A trainer may announce weights and leave the engine's name unchanged; the engine was asked since.
        current = self._current.get(key.url)
        name_now = now.engine_name or (current.engine_name if current is not None else None)
        return name_now is not None and name_now != key.engine_name

    def _has_others(self, key: CacheKey, names: set[str]) -> bool:
        """Whether ``names`` has a name other than the engine's at the start; if so, the key is retired."""
        is_other = key.engine_name is not None and bool(names - {key.engine_name})
        if is_other and not key.is_over:
            logger.info("weights of %s changed to %s: its cache key is no longer used", key.url, sorted(names))
            key.is_over = True
            if self._current.get(key.url) is key:
                self._current.pop(key.url, None)  # not `del`: rollouts in threads also call this
        return is_other


def _names(turn: Turn) -> set[str]:
    return {*(span.version for span in turn.versions), *turn.seen_versions}


def _numbered(key: CacheKey, sent: AnnouncedWeights, now: AnnouncedWeights, turn: Turn) -> Turn:
    base = sent.version or 0

    def named(name: str) -> str:
        number = number_of(name)
        if number is None:
            return str(base)
        # The name predates this trainer's first announcement and is not a version of this run.
        is_foreign = name == key.engine_name and key.is_first and now.version is not None
        return str(base) if is_foreign and number > max(base, now.version or 0) else str(number)

    if turn.versions or turn.seen_versions:
        spans = [VersionSpan(named(span.version), span.start, span.end) for span in turn.versions]
        seen = dict.fromkeys(map(named, turn.seen_versions))
        return msgspec.structs.replace(turn, versions=merged(spans), seen_versions=list(seen))
    seen_numbers = list(dict.fromkeys([base] if sent.id == now.id else [base, now.version or 0]))
    if len(seen_numbers) == 1 and turn.sampled_ids:
        return msgspec.structs.replace(turn, versions=[VersionSpan(str(base), 0, len(turn.sampled_ids))])
    return msgspec.structs.replace(turn, seen_versions=list(map(str, seen_numbers)))
