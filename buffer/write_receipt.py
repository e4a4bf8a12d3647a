"""What a writer is told of its sample, and when."""

from asyncio import Future, get_running_loop
from collections.abc import Callable
from functools import partial

from forebay.buffer.groups.table import Sample
from forebay.buffer.store.abc import finish
from forebay.buffer.store.rows import Location, Outcome
from forebay.core.errors import StorageFailed

WhenStored = Callable[[StorageFailed | None], None]


class Receipt:
    """What became of a sample. It holds once the sample is stored: see ``stored`` and ``when_stored``."""

    __slots__ = ("_calls", "_error", "_future", "_is_settled", "_kept", "is_duplicate", "is_failed", "outcome", "uid")

    def __init__(self, uid: str, outcome: Outcome, is_failed: bool, kept: Sample | None = None) -> None:
        """``kept`` is what memory has of the sample, and of its body until the disk has it."""
        self.uid = uid
        self.is_duplicate = False
        self.outcome = outcome
        self.is_failed = is_failed
        self._kept = kept
        self._is_settled = False
        self._error: StorageFailed | None = None
        self._calls: list[WhenStored] | None = None
        self._future: Future[None] | None = None

    @classmethod
    def of_repeat(cls, uid: str, first: "Receipt | None") -> "Receipt":
        """The receipt of a uid that came before; ``first`` is that of its sample while the disk does not have it."""
        receipt = cls(uid, "member", is_failed=False)
        receipt.is_duplicate = True
        if first is None:
            receipt.settle(None, None)
        else:
            receipt._future = first.stored
            first.when_stored(lambda error: receipt.settle(None, error))
        return receipt

    def settle(self, location: Location | None, error: StorageFailed | None) -> None:
        """The disk has the sample, or will not have it."""
        self._is_settled, self._error = True, error
        kept = self._kept
        if kept is not None and error is None:
            kept.location, kept.body = location, None
        # A call may hold this receipt and the sample's body: kept here, both would wait for the cyclic collector.
        calls, self._calls = self._calls, None
        for call in calls or ():
            call(error)

    def when_stored(self, call: WhenStored) -> None:
        """Have ``call`` made with None or the error, in the loop's thread: at once if it is settled, else then."""
        if self._is_settled:
            call(self._error)
        elif self._calls is None:
            self._calls = [call]
        else:
            self._calls.append(call)

    @property
    def stored(self) -> "Future[None]":
        """Done when the sample is on the disk. Raises ``StorageFailed``."""
        if self._future is None:
            self._future = future = get_running_loop().create_future()
            self.when_stored(partial(finish, future, None))
        return self._future
