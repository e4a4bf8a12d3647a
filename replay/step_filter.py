"""Finds groups by steps and by names, and the steps whose bodies all still exist."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from forebay.core.errors import BodiesGone
from forebay.core.group import BatchState
from forebay.core.records.rows import BatchRow, GroupRow, StoredSample
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.options import is_chosen
from forebay.replay.source import Source

GROUPS_PER_LOOK = 256
"""The number of groups whose samples are read at a time."""

_STANDING = frozenset({BatchState.LEASED, BatchState.ACKED})
_Number = Callable[[BatchRow], int | None]


def chosen_groups(
    groups: Sequence[GroupRow], batches: Sequence[BatchRow], steps: Sequence[tuple[int, int]] | None
) -> list[GroupRow]:
    """The groups of ``chosen_batches``, each once, in order of delivery; all groups if ``steps`` is None.

    Raises ``NotRecorded``.
    """
    if steps is None:
        return list(groups)
    known = {group.group_id: group for group in groups}
    wanted = dict.fromkeys(key for batch in chosen_batches(batches, steps) for key in batch.group_ids)
    return [known[key] for key in wanted if key in known]


def named_groups(groups: Sequence[GroupRow], names: Sequence[str]) -> list[GroupRow]:
    """The groups with these ids, beginnings of ids, or instance ids; without names, all. Raises ``NotRecorded``."""
    found: dict[str, GroupRow] = {}
    for name in names:
        # An instance may be called like the beginning of another group's id.
        of_name = [group for group in groups if name in (group.group_id, str(group.instance_id))]
        of_name = of_name or [group for group in groups if name and group.group_id.startswith(name)]
        if not of_name:
            hint = "name a group by its id, its beginning, or its instance; `forebay show RUN` lists them"
            raise NotRecorded(f"there is no group {name!r:.100}", hint=hint, field="groups")
        found |= {group.group_id: group for group in of_name}
    return [group for group in groups if group.group_id in found] if names else list(groups)


def chosen_batches(batches: Sequence[BatchRow], steps: Sequence[tuple[int, int]]) -> list[BatchRow]:
    """The batches of these steps, by number.

    The step of a batch is the one announced by the trainer, else the checkpoint that contains the batch, else the
    batch's own number: for all batches, the first of these that any batch has. Released, expired and revoked batches
    count only if the step has no others. Raises ``NotRecorded`` unless both ends of each range were recorded.
    """
    by_step = batches_by_step(batches)
    missing = sorted({end for ends in steps for end in ends} - by_step.keys())
    if missing:
        there = f"recorded steps: {ranges_text(by_step)}" if by_step else "no batch was ever delivered"
        named = f"steps {ranges_text(missing)} are" if len(missing) > 1 else f"step {missing[0]} is"
        raise NotRecorded(f"{named} not recorded: {there}", hint="--steps A-B,C selects recorded steps", field="steps")
    chosen = [batch for step, held in by_step.items() if is_chosen(step, steps) for batch in held]
    return sorted(chosen, key=lambda batch: batch.number)


def ranges_text(numbers: Iterable[int]) -> str:
    """Numbers in the format of ``--steps``: ``1-4,7``."""
    ordered = sorted(set(numbers))
    breaks = [at for at, (one, next_one) in enumerate(pairwise(ordered), 1) if next_one != one + 1]
    runs = [ordered[a:b] for a, b in pairwise([0, *breaks, len(ordered)])] if ordered else []
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


async def check_bodies(source: Source, chosen: Sequence[GroupRow]) -> None:
    """Raise ``BodiesGone``, with the steps still complete, if the body of any of these groups is gone."""
    gone = set(await _without_bodies(source, chosen))
    if not gone:
        return
    groups, batches = await source.groups(), await source.batches()
    gone.update(await _without_bodies(source, groups))
    by_step = batches_by_step(batches)
    left = [step for step, held in by_step.items() if not any(gone.intersection(b.group_ids) for b in held)]
    hint = f"these steps are still complete: {ranges_text(left)}" if left else "no step is still complete"
    raise BodiesGone([group.group_id for group in chosen if group.group_id in gone], hint=hint)


async def weight_versions(source: Source, groups: Sequence[GroupRow]) -> tuple[int, int] | None:
    """The oldest and newest weight versions of these groups' samples; None if the samples have none."""
    named = [
        sample.row.oldest_version
        async for found in _samples_by_group(source, groups)
        for samples in found.values()
        for sample in samples
        if sample.row.oldest_version is not None
    ]
    return (min(named), max(named)) if named else None


def batches_by_step(batches: Sequence[BatchRow]) -> dict[int, list[BatchRow]]:
    """The batches of each step, as ``chosen_batches`` counts steps."""
    ways: list[_Number] = [lambda batch: batch.step, lambda batch: batch.checkpoint_step, lambda batch: batch.number]
    number = next((way for way in ways if any(way(batch) is not None for batch in batches)), ways[0])
    found: dict[int, list[BatchRow]] = {}
    for batch in batches:
        if (step := number(batch)) is not None:
            found.setdefault(step, []).append(batch)
    return {step: [b for b in held if b.state in _STANDING] or held for step, held in found.items()}


async def _without_bodies(source: Source, groups: Sequence[GroupRow]) -> list[str]:
    gone: list[str] = []
    async for found in _samples_by_group(source, groups):
        gone += [key for key, samples in found.items() if not all(map(source.has_body, samples))]
    return gone


async def _samples_by_group(
    source: Source, groups: Sequence[GroupRow]
) -> AsyncIterator[Mapping[str, Sequence[StoredSample]]]:
    for first in range(0, len(groups), GROUPS_PER_LOOK):
        keys = [group.group_id for group in groups[first : first + GROUPS_PER_LOOK]]
        try:
            yield await source.samples(keys)
        except RecordingDamaged:  # a file, which has every body; reading its groups reports the damage
            continue
