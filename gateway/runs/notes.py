"""Count what the record does not contain, by kind: left out of a call, passed on unchecked, or sampled unrecorded."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

MAX_KINDS = 100
"""Kinds contain names from agents, and a run's report holds a few hundred: further kinds are counted as one."""
MAX_LENGTH = 64
OTHERS = "left_out_others"
UNRECORDED = "unrecorded_"
MEANING = {
    UNRECORDED: "its tokens are in no record",
    "left_out_": "an engine's chat has no equivalent, so it was left out",
    "passed_on_": "it was passed on unchanged, for the engine to check",
}


class Notes:
    """The notes of one run. ``on_change`` is called after each change of ``counts``."""

    def __init__(self, run_id: str, on_change: Callable[[], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._run_id = run_id
        self._on_change = on_change

    def add(self, kinds: Iterable[str], of_session: Counter[str]) -> None:
        """Count kinds for the run and its session; each kind is logged once."""
        names = [self._name(kind) for kind in kinds]
        for name in names:
            if name not in self.counts:
                self._log(name)
            self.counts[name] += 1
            of_session[name] += 1
        if names:
            self._on_change()

    def _name(self, kind: str) -> str:
        name = re.sub(r"[^a-z0-9]+", "_", kind.lower())[:MAX_LENGTH].strip("_")
        return name if name in self.counts or len(self.counts) < MAX_KINDS else OTHERS

    def _log(self, name: str) -> None:
        meaning = next(words for prefix, words in MEANING.items() if name.startswith(prefix))
        logger.warning("a call in run %s: %s: %s (further ones are only counted)", self._run_id, name, meaning)
