"""How far a group's weights are behind the trainer's."""

from collections import Counter
from collections.abc import Iterable

from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.run_warnings import UNANNOUNCED, warn
from forebay.core.group import DiscardReason, GroupState
from forebay.core.reward_place import Parts

MARK = b',"is_stale":true}'


def bound(buffer: RunBuffer, max_staleness: int | None) -> int | None:
    """The oldest weight version that is not stale, by the reader's own bound or the run's; None if nothing is."""
    most = buffer.run.settings.max_staleness if max_staleness is None else max_staleness
    current = buffer.run.weight_version
    if most is None:
        return None
    if current is None:
        warn(buffer.run, UNANNOUNCED)
        return None
    return current - most


def discard_stale(buffer: RunBuffer, oldest: int | None) -> None:
    """Discard the ready groups that are older than ``oldest``, unless the run keeps them."""
    if oldest is not None and buffer.run.settings.stale_groups == "discard":
        # Found by version, without a look at every group that is ready.
        for group in buffer.groups.take_older(oldest):
            discard(buffer, group)


def is_stale(group: SampleGroup, oldest: int | None) -> bool:
    """Whether the group has a sample of older weights than ``oldest``."""
    version = None if oldest is None else group.oldest_version
    return oldest is not None and version is not None and version < oldest


def discard(buffer: RunBuffer, group: SampleGroup) -> None:
    """End a group that is stale."""
    if group.state in (GroupState.OPEN, GroupState.READY):
        detail = f"its oldest sample is of weight version {group.oldest_version}, now it is {buffer.run.weight_version}"
        if group.oldest_version == 0:
            detail += "; samples from before the run's first announcement count as version 0"
        buffer.move(group, GroupState.DISCARDED, DiscardReason.STALE, detail)


def distribution(groups: Iterable[SampleGroup], current: int | None) -> dict[str, int] | None:
    """How many of the groups' samples are how stale, ``unknown`` last; None if no sample names a version."""
    versions = [sample.row.oldest_version for group in groups for sample in group.completed]
    if all(version is None for version in versions):
        return None
    counts = Counter(None if v is None or current is None else current - v for v in versions)
    unknown = counts.pop(None, 0)
    known = {str(staleness): number for staleness, number in sorted(counts.items(), key=lambda item: item[0] or 0)}
    return known | ({"unknown": unknown} if unknown else {})


def marked(row: Parts) -> Parts:
    """The encoded row with ``is_stale`` in it."""
    # The last part ends with the object's own brace: the mark goes in before it.
    end = bytes(row[-1]).rstrip()
    return (*row[:-1], end[:-1], MARK)
