"""The promise of delivery once more, over a buffer that remembers nothing that is done with: the store has it."""

from collections.abc import Awaitable
from contextlib import suppress
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from forebay.buffer.groups.sample_group import SampleGroup
from forebay.core.errors import StorageFailed
from forebay.core.group import BatchState
from forebay.core.records.rows import BatchRow
from tests.buffer.buffer_machine import ResultT
from tests.buffer.test_delivery_model import DeliveryModel, JournalDeliveryModel


class ForgetfulDeliveryModel(DeliveryModel):
    """Groups and batches that are done with leave memory before and after each call."""

    options: ClassVar[dict[str, int]] = {"remembered_samples": 0}

    def do(self, work: Awaitable[ResultT]) -> ResultT:
        self._forget()
        try:
            return super().do(work)
        finally:
            self._forget()

    def _forget(self) -> None:
        if hasattr(self, "buffer") and self.buffer.entries and not self.entry.buffer.has_failed:
            with suppress(StorageFailed, RuntimeError):  # the disk refuses, or the store has just been closed
                super().do(self.entry.buffer.gone.forget())

    @property
    def groups(self) -> dict[str, SampleGroup]:
        """All of them, for a moment."""
        super().do(self._recall())
        by_id = self.entry.buffer.groups.by_id
        return dict(sorted(by_id.items(), key=lambda item: item[1].row.number))

    @property
    def batches(self) -> dict[str, BatchRow]:
        """All of them, for a moment."""
        super().do(self._recall())
        return {row.batch_id: row for row in self.entry.buffer.batches.in_state(*BatchState)}

    async def _recall(self) -> None:
        async with self.entry.buffer.gone.everything():
            pass

    @invariant()
    def every_group_is_where_it_was_promised_to_be(self) -> None:
        if hasattr(self, "buffer"):
            assert self.groups is not None  # the books are about what is in memory
            super().every_group_is_where_it_was_promised_to_be()

    @invariant()
    def every_batch_is_listed_as_it_is(self) -> None:
        if hasattr(self, "buffer"):
            self._forget()
            listed = super().do(self.entry.buffer.gone.all_batches())
            assert [(row.batch_id, row.state.value, row.checkpoint_step) for row in listed] == [
                (key, batch.state, batch.checkpoint) for key, batch in self.model.batches.items()
            ]


class ForgetfulJournalModel(ForgetfulDeliveryModel, JournalDeliveryModel):
    """The same on a disk."""


TestForgetfulInMemory = ForgetfulDeliveryModel.TestCase
TestForgetfulInMemory.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestForgetfulOnDisk = ForgetfulJournalModel.TestCase
TestForgetfulOnDisk.settings = settings(
    max_examples=10, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
