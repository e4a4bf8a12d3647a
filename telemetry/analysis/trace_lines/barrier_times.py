"""How long each engine stood at a step's barrier: it had ended all of the step's requests, and ran no other's."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from forebay.telemetry.analysis.intervals import union
from forebay.telemetry.analysis.timeline import Request
from forebay.telemetry.analysis.trace_lines.trace_index import NS


class BusyEngines:
    """When each engine had requests, whichever step they were for."""

    def __init__(self, times: Mapping[str, "array[int]"]) -> None:
        """``times``: by engine, begin and end in ns of each of its requests, one after the other."""
        self._begins: dict[str, array[int]] = {}
        self._ends: dict[str, array[int]] = {}
        for engine, flat in times.items():
            busy = union(zip(flat[::2], flat[1::2], strict=True))
            self._begins[engine] = array("q", (begin for begin, _ in busy))
            self._ends[engine] = array("q", (end for _, end in busy))

    def barriers(self, requests: Iterable[Request], release_s: float) -> dict[str, dict[str, float]]:
        """By the workers of ``requests``, as phases: ``barrier_wait`` until ``release_s``."""
        ended: dict[str, float] = {}
        for request in requests:
            if request.worker:
                ended[request.worker] = max(ended.get(request.worker, 0.0), request.end_s)
        return {
            worker: {"barrier_wait": self._idle(worker, end_s, release_s)} for worker, end_s in sorted(ended.items())
        }

    def _idle(self, engine: str, begin_s: float, end_s: float) -> float:
        """Seconds between the two in which the engine had no request at all."""
        if end_s <= begin_s:
            return 0.0
        begin, end = round(begin_s / NS), round(end_s / NS)
        begins, ends = self._begins.get(engine, array("q")), self._ends.get(engine, array("q"))
        busy = 0
        for number in range(bisect_left(ends, begin), bisect_left(begins, end)):
            busy += max(0, min(ends[number], end) - max(begins[number], begin))
        return max(0.0, (end - begin - busy) * NS)
