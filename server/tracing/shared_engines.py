"""Records in the traces of runs which engines they share with other runs of this server."""

from collections.abc import Iterable
from contextlib import suppress
from time import monotonic

from forebay.core.addresses import engine_root, without_login
from forebay.server.tracing.run_traces import RunTraces
from forebay.telemetry.tracing.records import SharedEngines

Shared = tuple[list[str], list[str]]
"""Engines, and the other runs that use them."""


class SharedEngineRecords:
    """Knows the engines of all runs that have a process, by their addresses."""

    def __init__(self, traces: RunTraces) -> None:
        self._traces = traces
        self._engines: dict[str, set[str]] = {}
        self._recorded: dict[str, Shared] = {}

    def note(self, run_id: str, urls: Iterable[str] = ()) -> None:
        """Record in each trace what has changed now that the run uses these engines."""
        self._engines[run_id] = {without_login(engine_root(url)) for url in urls}
        for each in list(self._engines):
            shared = self._shared(each)
            # The first set of a run is recorded even if it is empty: an earlier server may have been killed.
            if shared != self._recorded.get(each):
                self._recorded[each] = shared
                with suppress(KeyError):  # the run was removed
                    trace = self._traces.get(each)
                    trace.write(SharedEngines(t=trace.at(monotonic()), engines=shared[0], runs=shared[1]))
        if not self._engines[run_id]:
            del self._engines[run_id]
            self._recorded.pop(run_id, None)

    def _shared(self, run_id: str) -> Shared:
        own, engines, runs = self._engines[run_id], set[str](), list[str]()
        for other, theirs in self._engines.items():
            if other != run_id and (both := own & theirs):
                engines |= both
                runs.append(other)
        return sorted(engines), sorted(runs)
