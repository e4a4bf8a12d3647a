"""What each engine did over all steps, for the comparison side by side."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from forebay.telemetry.analysis.causes.engine_book import PARTS, EngineBook, WorkCall, cached_share, known
from forebay.telemetry.analysis.report import EngineFigures
from forebay.telemetry.analysis.robust import median
from forebay.telemetry.analysis.timeline import Request

_MOST = 512
"""Calls that are kept of an engine."""


class EngineTotals:
    """Collects the calls of all steps, and keeps the last ones of each engine."""

    def __init__(self) -> None:
        self.calls: dict[str, list[WorkCall]] = defaultdict(list)
        self._requests: dict[str, int] = defaultdict(int)
        self._num_calls: dict[str, int] = defaultdict(int)

    def add(self, book: EngineBook, requests: Iterable[Request]) -> None:
        """Add the calls of a step."""
        for request in requests:
            self._requests[request.worker] += 1
        for call in book.calls:
            self._num_calls[call.engine] += 1
            if not book.is_shared(call):
                self.calls[call.engine].append(call)
        for own in self.calls.values():
            del own[:-_MOST]

    def figures(self) -> list[EngineFigures]:
        """Ordered by name."""
        return [self._of(name, own) for name, own in sorted(self.calls.items())]

    def _of(self, name: str, own: Sequence[WorkCall]) -> EngineFigures:
        rates = [(call.work_s if call.decode_s is None else call.decode_s) / call.tokens for call in own if call.tokens]
        prefill, network = known(own, PARTS["prefill"]), known(own, PARTS["engine"])
        return EngineFigures(
            engine=name,
            num_requests=self._requests[name],
            num_calls=self._num_calls[name],
            s_per_token=median(rates) if rates else None,
            prefill_s=median(prefill) if prefill else None,
            queue_s=median([call.queue_s for call in own]) if prefill else None,
            network_s=median(network) if network else None,
            cached_share=cached_share(own) if any(call.prompt for call in own) else None,
        )
