"""Everything in place: the groups of a recording go through two rehearsals, and what becomes of them is added up."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.buffer.rehearsal import Rehearsal
from forebay.buffer.rehearsed_groups import Treatment, rehearse
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import GroupRow
from forebay.replay.chosen_groups import chosen_groups
from forebay.replay.comparison import Comparison
from forebay.replay.options import parse_steps
from forebay.replay.source import Source
from forebay.server.cli.compare.changed_settings import settings_of
from forebay.server.cli.compare.judging_code import JudgingCodes, find_codes
from forebay.server.cli.compare.new_rewards import NewRewards, open_rewarder
from forebay.server.cli.output import make_console

INSPECT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class WhatChanges:
    """What is to be otherwise."""

    code: Path | None = None
    """A generator file, for its hooks."""
    reward: str | None = None
    """``FILE:NAME`` of a function."""
    settings: dict[str, Any] = field(default_factory=dict)

    def facts(self, codes: JudgingCodes) -> dict[str, str]:
        """It in words."""
        changes = [f"{name}={value!r}" for name, value in self.settings.items()]
        facts = {"hooks": f"as recorded {codes.recorded}"}
        if codes.differ:
            facts["hooks"] += f"; as changed {codes.changed}"
        return facts | ({"settings": f"as changed {', '.join(changes)}"} if changes else {})


async def compare(source: Source, changes: WhatChanges, steps: str | None) -> tuple[dict[str, str], Comparison]:
    """What is compared, in words, and what becomes of it. ``steps``: only their groups.

    Raises ``InvalidInput`` for settings, code or steps that cannot be used.
    """
    run = source.run
    settings, changed = settings_of(run), settings_of(run, changes.settings)
    codes = await find_codes(run, changes.code, INSPECT_TIMEOUT_S)
    is_changed = bool(codes.differ or changes.reward or changes.settings)
    comparison = Comparison(run, has_code=codes.has_recorded, has_other_hooks=codes.differ, is_changed=is_changed)
    groups = await _chosen(source, steps)
    async with AsyncExitStack() as stack:
        rewards = await _open_rewards(stack, changes.reward, run)
        is_slime = await _is_read_by_slime(source)
        before = Rehearsal(run, settings, codes.recorded.make_hooks(run, settings), is_slime=is_slime)
        treatments = [Treatment(await stack.enter_async_context(before))]
        if is_changed:
            after = Rehearsal(run, changed, codes.changed.make_hooks(run, changed), is_slime=is_slime)
            treatments.append(
                Treatment(await stack.enter_async_context(after), None if rewards is None else rewards.change)
            )
        with _progress(len(groups)) as note:
            async for each in rehearse(source, groups, settings, treatments):
                note()
                if each.damage:
                    comparison.add_damaged(each.group, each.damage)
                else:
                    comparison.add(each.group, *each.outcomes)
    name = f"{run.name}, {run.run_id}" if run.name else run.run_id
    which = {
        "recording": f"{name} ({run.task_type}), {comparison.num_groups:,} groups, {comparison.num_samples:,} samples"
    }
    asked = {} if rewards is None else {"rewards": f"as changed by {changes.reward}: {rewards.facts()}"}
    return which | changes.facts(codes) | asked, comparison


async def _open_rewards(stack: AsyncExitStack, given: str | None, run: RecordedRun) -> NewRewards | None:
    return None if given is None else NewRewards(await stack.enter_async_context(open_rewarder(given, run)))


async def _chosen(source: Source, steps: str | None) -> Sequence[GroupRow]:
    groups = await source.groups()
    return groups if steps is None else chosen_groups(groups, await source.batches(), parse_steps(steps))


async def _is_read_by_slime(source: Source) -> bool:
    batches = await source.batches()
    return any(batch.is_self_acking for batch in batches) if batches else source.run.origin == "slime"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    done = 0
    with console.status("") as status:

        def note() -> None:
            nonlocal done
            done += 1
            if done % 16 == 0:
                status.update(f"{done:,} of {total:,} groups")

        yield note
