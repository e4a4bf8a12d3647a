"""How many weight versions a group is behind the trainer."""

from collections import Counter
from collections.abc import Iterable

from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.run_warnings import UNANNOUNCED, warn
from forebay.core.group import DiscardReason, GroupState
from forebay.core.records.reward_place import Parts

MARK = b',"is_stale":true}'


def bound(buffer: RunBuffer, max_staleness: int | None) -> int | None:
    """The oldest weight version that is not stale, by the reader's bound or the run's; None without a bound."""
    most = buffer.run.settings.max_staleness if max_staleness is None else max_staleness
    current = buffer.run.weight_version
    if most is None:
        return None
    if current is None:
        warn(buffer.run, UNANNOUNCED)
        return None
    return current - most


def discard_stale(buffer: RunBuffer, oldest: int | None) -> None:
    """Discard ready groups older than ``oldest``, unless the run keeps stale groups."""
    if oldest is not None and buffer.run.settings.stale_groups == "discard":
        # Found by version, without scanning all ready groups.
        for group in buffer.groups.take_older(oldest):
            discard(buffer, group)


def is_stale(group: SampleGroup, oldest: int | None) -> bool:
    """Whether the group has a sample from weights older than ``oldest``."""
    version = None if oldest is None else group.oldest_version
    return oldest is not None and version is not None and version < oldest


def discard(buffer: RunBuffer, group: SampleGroup) -> None:
    """Discard a stale group."""
    if group.state in (GroupState.OPEN, GroupState.READY):
        version = buffer.run.weight_version
        detail = f"its oldest sample has weight version {group.oldest_version}; the current version is {version}"
        if group.oldest_version == 0:
            detail += "; samples from before the run's first announcement count as version 0"
        buffer.move(group, GroupState.DISCARDED, DiscardReason.STALE, detail)


def distribution(groups: Iterable[SampleGroup], current: int | None) -> dict[str, int] | None:
    """Count the groups' samples by staleness, ``unknown`` last; None if no sample names a version."""
    versions = [sample.row.oldest_version for group in groups for sample in group.completed]
    if all(version is None for version in versions):
        return None
    counts = Counter(None if v is None or current is None else current - v for v in versions)
    unknown = counts.pop(None, 0)
    known = {str(staleness): number for staleness, number in sorted(counts.items(), key=lambda item: item[0] or 0)}
    return known | ({"unknown": unknown} if unknown else {})


def marked(row: Parts) -> Parts:
    """Add ``is_stale`` to an encoded row."""
    # The last part ends with the object's closing brace: the mark replaces it.
    end = bytes(row[-1]).rstrip()
    return (*row[:-1], end[:-1], MARK)
