"""Training steps as checkpoints of a run: what all adapters of trainers do around their own conversion of rows.

Each step is a checkpoint of the run, made before the trainer trains on the step, with exactly the groups returned for
it. When a trainer restarts, the steps that its model has seen are known, and the run is rewound to the last of them.
Checkpoints without a model are harmless. So it does not matter when the trainer saves, or which steps it had already
fetched by then.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from forebay.client.errors import ServerUnreachable, make_error
from forebay.client.model import Batch, RunStats
from forebay.client.trainer.buffer_client import BufferClient
from forebay.core.errors import BodiesGone, ForebayError, InvalidInput, RunEnded

logger = logging.getLogger(__name__)

WAIT_S = 10.0
"""Seconds of waiting after which the run is checked and the wait is logged."""
MAX_UNUSABLE = 4
"""Unusable groups, in multiples of a step's groups, after which the step fails."""

GroupT = TypeVar("GroupT")


@dataclass(frozen=True, slots=True)
class Unusable:
    """A group that the trainer cannot train on, and why."""

    instance_id: object
    reason: str


@dataclass
class LeasedStep:
    """What was leased for one step."""

    client: BufferClient
    number: int
    batches: list[Batch] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)

    def collect(
        self,
        num_groups: int,
        groups_of: Callable[[Batch], Sequence[GroupT | Unusable]],
        max_unusable: int | None = None,
    ) -> list[GroupT]:
        """Lease whole groups, no more than needed, until ``num_groups`` of those in ``groups_of(batch)`` are usable.

        Raises ``RunEnded`` when the run has too few groups left; they stay in the buffer. Raises ``InvalidInput`` if
        more groups are unusable than ``max_unusable``, by default four times ``num_groups``.
        """
        groups: list[GroupT] = []
        while missing := num_groups - len(groups):
            self.batches.append(self._next_batch(missing))
            for group in groups_of(self.batches[-1]):
                if isinstance(group, Unusable):
                    self.unusable.append(group)
                    logger.warning("skipping a group of %r: %s", group.instance_id, group.reason)
                else:
                    groups.append(group)
            if len(self.unusable) > (max_unusable or MAX_UNUSABLE * num_groups):
                raise _useless(self.unusable)
        return groups

    def _next_batch(self, num_groups: int) -> Batch:
        began_s, wait_s = time.monotonic(), 0.0
        while True:
            with suppress(RunEnded):  # raised below, with more detail
                batch = self.client.read(num_groups, wait_s=wait_s, step=self.number)
                if batch is not None:
                    return replace(batch, wait_s=time.monotonic() - began_s)
            stats = self.client.stats()
            if stats.has_ended and stats.groups.get("ready", 0) < num_groups:
                raise _ended(stats, num_groups, self.number)
            if wait_s and stats.is_held and self.unusable:  # the server counts them and makes no others this step
                raise _useless(self.unusable)
            if wait_s:
                waiting = "the engine" if stats.is_waiting_for_engine else f"{num_groups} groups"
                logger.info("waiting for %s: %s, discarded %s", waiting, stats.groups, stats.discarded)
            wait_s = WAIT_S


class MarkedSteps:
    """The steps of one training, for the lifetime of the trainer's process."""

    def __init__(self, client: BufferClient) -> None:
        self.client = client
        self._last: int | None = None
        """The step returned last."""

    def find(self, name: str, task_type: str, group_size: int) -> bool:
        """Attach to the newest run with this name, if its task type and group size match. Returns whether it did."""
        # Runs are listed oldest first; older ones were abandoned for the newest, even if they still have groups.
        newest = next(reversed(self.client.runs(name)), None)
        if newest is None or (newest.task_type, newest.settings.get("group_size")) != (task_type, group_size):
            return False
        self.client.attach(newest.run_id)
        logger.info("resuming run %s, which is %s", newest.run_id, newest.state)
        return True

    def begin(self, step: int, start: Callable[[], object] | None = None) -> None:
        """Rewind what was returned for ``step`` and later, unless the step before was returned last.

        A run that cannot be rewound to its beginning, or is spent, is replaced with ``start``.
        """
        if self._last is not None and step > self._last:
            return
        steps = [checkpoint.step for checkpoint in self.client.checkpoints()]
        seen = max((each for each in steps if each < step), default=None)
        if seen is not None and seen != step - 1:
            logger.warning("step %d begins, but the last checkpoint before it is %d", step, seen)
        try:
            undone = self.client.rewind(seen)
        except BodiesGone as error:
            if seen is not None or start is None:
                raise
            logger.warning("run %s cannot be rewound, starting another one: %s", self.client.run_id, error)
            start()
            return
        if undone.num_groups:
            logger.info("%d groups of later steps are ready again", undone.num_groups)
        if seen is None and start is not None and _is_spent(self.client.stats()):
            logger.warning("run %s ended without groups, starting another one", self.client.run_id)
            start()

    @contextmanager
    def step(self, number: int) -> Iterator[LeasedStep]:
        """Mark the step with what was leased for it when the block ends; after an error, release its leases."""
        self._last = None  # if this step fails, the next one rewinds
        step = LeasedStep(self.client, number)
        try:
            yield step
            # The checkpoint includes unusable groups too: after a rewind they are read and skipped again.
            self.client.checkpoint(number, step.batches)
        except Exception as error:  # of any kind: batches leased by this step must be released
            if not isinstance(error, ServerUnreachable):
                with suppress(ForebayError):  # the rewind of the next step releases the rest
                    self.client.release(step.batches)
            raise
        self._last = number


def _ended(stats: RunStats, num_groups: int, step: int) -> ForebayError:
    left = f"{stats.groups.get('ready', 0)} groups are left, step {step} needs {num_groups}"
    why = f" ({stats.reason.partition(chr(10))[0]})" if stats.reason else ""
    hint = "raise num_epoch (slime: --num-epoch) for more groups, or start another run under another name"
    return make_error("run_ended", f"run {stats.run_id!r} is {stats.state}{why}: {left}", hint=hint)


def _is_spent(stats: RunStats) -> bool:
    """Whether a run failed or was stopped, and has no groups."""
    return stats.state in ("failed", "stopped") and not stats.groups.get("ready") and not stats.groups.get("open")


def _useless(unusable: Sequence[Unusable]) -> InvalidInput:
    return InvalidInput(
        f"the trainer can use none of {len(unusable)} groups; the last, {unusable[-1].instance_id!r}: "
        f"{unusable[-1].reason}",
        hint="they were released to the buffer; fix the generator or its hooks",
    )
