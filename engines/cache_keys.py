"""The namespaces in which engines cache what they compute, so that no call gets the cache of other weights unmarked.

SGLang looks up a prompt among the calls with the same ``extra_key`` and leaves it there. Weights that change in place
empty no cache: a key must stand for the same weights for ever. So keys are random, made here, and used as long as
nothing was announced and the engine called its weights as it did before the first call with the key. A call that was
under way at a change used its old key: ``judged`` marks it, unless it is certain that all its tokens are of one policy.
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
SEPARATOR = "/"
"""Between our key and the caller's own, which tells caches apart as well."""


@dataclass(eq=False, slots=True)
class CacheKey:
    """The namespace of calls to the engine at ``url``. ``text`` is what the engine is told."""

    text: str
    url: str
    weights: AnnouncedWeights | None
    """What had been announced when it was made; None where nobody announces."""
    engine_name: str | None
    """What the engine called its weights before the first call; None where it does not say."""
    is_first: bool = True
    """Whether it is the first one at this engine since that announcement."""
    is_over: bool = False
    """Whether the engine was seen with other weights since."""

    def beside(self, own: object) -> str:
        """The ``extra_key`` of a call for which the caller has one of its ``own``."""
        return self.text if own is None else f"{self.text}{SEPARATOR}{own}"


class CacheKeys:
    """Those of a run, one at a time for each engine. ``name_at`` asks an engine what it calls its weights."""

    def __init__(self, name_at: Callable[[str], Awaitable[str | None]]) -> None:
        self._name_at = name_at
        self._weights: AnnouncedWeights | None = None
        self._current: dict[str, CacheKey] = {}
        self._remembered: dict[str, CacheKey] = {}
        self._lock = threading.Lock()
        self._keyed: set[str] = set()
        """The engines that had a key since the last announcement."""
        self._tasks = TaskSet()
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Ask nobody any more."""
        await self._tasks.cancel()

    def announce(self, weights: AnnouncedWeights | None) -> None:
        """The trainer has said this last: what was said before may come again."""
        before = self._weights
        if before is not None and weights is not None and weights.id == before.id:
            return
        self._weights = weights
        if before is None:
            # What came before the first news of a run that goes on was sent under what they tell.
            for key in self._remembered.values():
                key.weights = weights
        else:
            self._current.clear()
            self._keyed.clear()

    def forget(self, url: str) -> None:
        """The engine there failed: it may come back with other weights."""
        self._current.pop(url, None)

    def has(self, url: str) -> bool:
        """Whether there is a key for the engine there, so that nothing has to be awaited."""
        return url in self._current

    async def prepare(self, url: str) -> None:
        """Have a key for the engine there. Never raises for what the engine does."""
        while url not in self._current:
            if url not in self._asking:
                self._asking[url] = self._tasks.start(self._make(url))
            await asyncio.shield(self._asking[url])  # others wait for it too: this caller may be cancelled

    def of(self, url: str) -> CacheKey:
        """The key for a call to the engine there; one for this call alone if none is prepared."""
        return self._current.get(url) or self._new(url, None)

    def sent(self, extra_key: object) -> CacheKey | None:
        """The key that a call was sent with."""
        return self._remembered.get(str(extra_key).partition(SEPARATOR)[0])

    async def _make(self, url: str) -> None:
        weights = self._weights
        try:
            name = await self._name_at(url)
        finally:
            del self._asking[url]
        # Else the name may be that of the weights before: it is asked for again.
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

    # --- what came of calls

    def judged(self, key: CacheKey, turns: Iterable[Turn]) -> list[Turn]:
        """The turns of a call with this key: marked where other weights may have filled its cache, versions as numbers.

        Weights that an engine names by a word, or not at all, have the version that was announced last when the call
        was sent; before the first announcement, version 0.
        """
        return [self._judged(key, turn) for turn in turns]

    def _judged(self, key: CacheKey, turn: Turn) -> Turn:
        weights = self._weights
        if weights is None or key.weights is None:
            # No trainer announces: weights that change without a word are believed to empty the cache.
            self._has_others(key, _names(turn))
            return turn
        is_mixed = turn.is_kv_mixed or self._is_mixed(key, key.weights, weights, _names(turn))
        return msgspec.structs.replace(_numbered(key, key.weights, weights, turn), is_kv_mixed=is_mixed)

    def _is_mixed(self, key: CacheKey, sent: AnnouncedWeights, now: AnnouncedWeights, names: set[str]) -> bool:
        """Whether the cache of a call, sent under ``sent``, may be that of others than the weights ``names``."""
        # What was announced since emptied the caches, or nothing was.
        if sent.id != now.id and now.last_kept <= sent.number:
            return False
        if self._has_others(key, names) or key.is_over:
            return True
        if key.engine_name is None and len(names) == 1:
            (key.engine_name,) = names  # it did not answer before the first call
        return sent.id != now.id and not (names and self._shows(key, sent, now))

    def _shows(self, key: CacheKey, sent: AnnouncedWeights, now: AnnouncedWeights) -> bool:
        """Whether tokens of the weights announced now bear another name than those from before, as far as is known."""
        if key.engine_name is None or now.number != sent.number + 1:
            return False
        # A trainer may leave the engine the name that it had, whatever it announces: the engine was asked since.
        current = self._current.get(key.url)
        name_now = now.engine_name or (current.engine_name if current is not None else None)
        return name_now is not None and name_now != key.engine_name

    def _has_others(self, key: CacheKey, names: set[str]) -> bool:
        """Whether any of ``names`` is another than the engine had for its weights: then the key is used no more."""
        is_other = key.engine_name is not None and bool(names - {key.engine_name})
        if is_other and not key.is_over:
            logger.info("the weights of %s have changed to %s: its cache is used no more", key.url, sorted(names))
            key.is_over = True
            if self._current.get(key.url) is key:
                self._current.pop(key.url, None)  # not `del`: rollouts in threads come here as well
        return is_other


def _names(turn: Turn) -> set[str]:
    return {*(span.version for span in turn.versions), *turn.seen_versions}


def _numbered(key: CacheKey, sent: AnnouncedWeights, now: AnnouncedWeights, turn: Turn) -> Turn:
    base = sent.version or 0

    def named(name: str) -> str:
        number = number_of(name)
        if number is None:
            return str(base)
        # Named by another trainer before this one's first word: no version of this run.
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
