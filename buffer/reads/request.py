"""What a trainer asks for, and adding up groups until it is satisfied."""

from dataclasses import dataclass

from forebay.buffer.groups.groups import SampleGroup
from forebay.buffer.reads.judging import Staged
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.ids import InstanceId


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What a trainer asks for. Without a size: everything that is ready, within the run's caps for legacy reads."""

    num_groups: int | None = None
    batch_size: int | None = None
    """Rows, counted after the hooks; whole groups go until there are at least so many."""
    is_slime: bool = False
    """Each group goes out with exactly ``group_size`` rows, and the batch is acknowledged by its last byte."""
    lease_s: float = 600.0
    """Seconds for which a batch that is not slime's is the reader's."""
    step: int | None = None
    """What the trainer will use the batch for."""
    max_staleness: int | None = None
    """In place of the run's own bound."""
    request_id: str = ""
    """Repeated while its batch is leased, it means that batch."""

    @property
    def has_size(self) -> bool:
        return self.num_groups is not None or self.batch_size is not None


@dataclass(frozen=True, slots=True)
class ChosenGroup:
    """A group to hand out, and what of it goes out of the whole that its hooks made."""

    group: SampleGroup
    staged: Staged
    whole: Staged
    is_stale: bool = False
    """Whether it is over the bound for staleness, and goes out all the same."""

    @property
    def is_current(self) -> bool:
        """Whether it got no further sample since its hooks were asked."""
        return self.group.staged is self.whole


class Chooser:
    """Adds up groups until a request is satisfied."""

    def __init__(self, buffer: RunBuffer, request: ReadRequest) -> None:
        self.request = request
        self.chosen: list[ChosenGroup] = []
        self._settings = buffer.run.settings
        self._num_rows = 0
        self._num_bytes = 0
        self._instances: set[InstanceId] = set()
        self._is_capped = False

    @property
    def is_satisfied(self) -> bool:
        if self.request.num_groups is not None:
            return len(self.chosen) >= self.request.num_groups
        if self.request.batch_size is not None:
            return self._num_rows >= self.request.batch_size
        return bool(self.chosen)

    @property
    def is_done(self) -> bool:
        return self._is_capped or (self.request.has_size and self.is_satisfied)

    def may_take(self, group: SampleGroup) -> bool:
        """A read without a size holds at most one group of an instance: slime's client groups by instance id."""
        return self.request.has_size or group.instance_id not in self._instances

    def take(self, choice: ChosenGroup) -> None:
        """Add a group, unless the caps of a read without a size forbid it."""
        if not self.request.has_size and self.chosen and self._is_over(choice.staged):
            self._is_capped = True
            return
        self.chosen.append(choice)
        self._num_rows += len(choice.staged.rows)
        self._num_bytes += 0 if self.request.has_size else choice.staged.num_bytes
        self._instances.add(choice.group.instance_id)

    def _is_over(self, staged: Staged) -> bool:
        limit = self._settings.legacy_read_max_groups
        if limit is not None and len(self.chosen) >= limit:
            return True
        return self._num_bytes + staged.num_bytes > self._settings.legacy_read_max_bytes
