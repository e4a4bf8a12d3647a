"""The output of ``forebay compare``: whether the recording can be repeated, then verdicts, rewards and advantages."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from forebay.replay.comparison import ChangedGroup, Comparison, Mismatch, Move
from forebay.server.cli.output import columns_table, facts_table, show_table

MOST_SHOWN = 20
"""Maximum number of groups in a table; ``--json`` has all."""


def show_comparison(console: Console, facts: dict[str, str], comparison: Comparison) -> None:
    """Print a comparison. ``facts`` describe what is compared."""
    show_table(console, facts_table({"self-check": self_check(comparison), **facts}))
    for note in _notes(comparison):
        show_table(console, facts_table({"note": note}))
    _show_mismatches(console, comparison.mismatches)
    _show_counts(console, comparison)
    if comparison.is_changed:
        _show_changes(console, comparison)


def self_check(comparison: Comparison) -> str:
    """One line on whether every group, with everything as recorded, gets its recorded verdict."""
    decided = comparison.num_groups - comparison.num_undecided
    text = f"{comparison.num_as_recorded:,} of {decided:,} groups have their recorded verdict"
    if comparison.num_undecided:
        text += f"; {comparison.num_undecided:,} more had none yet"
    if comparison.mismatches:
        text += f"; {len(comparison.mismatches):,} differ"
    return text


def _notes(comparison: Comparison) -> list[str]:
    notes = []
    hooks = ", ".join(comparison.run.generator_hooks)
    if not comparison.has_code:
        known = "verdicts as recorded come from the recording, advantages as recorded from the built-in hooks"
        used = (
            known
            if comparison.is_known_only_from_recording
            else "the built-in hooks are used instead; --code FILE uses those of a file"
        )
        notes.append(f"the recording does not have the hooks of its generator file ({hooks}): {used}")
    for damage in comparison.damages[:MOST_SHOWN]:
        group = f"group {damage.group_id} ({damage.instance_id!r}, epoch {damage.epoch})"
        notes.append(f"{group} is left out: {damage.reason}")
    if len(comparison.damages) > MOST_SHOWN:
        notes.append(f"{len(comparison.damages) - MOST_SHOWN:,} more groups are left out: --json names them")
    return notes


def _show_mismatches(console: Console, mismatches: Sequence[Mismatch]) -> None:
    if not mismatches:
        return
    console.print()
    table = columns_table("differs", "instance", "epoch", "recorded", "found")
    for each in mismatches[:MOST_SHOWN]:
        table.add_row(each.group_id, _id(each.instance_id), str(each.epoch), str(each.recorded), str(each.found))
    show_table(console, table)
    _say_more(console, len(mismatches))


def _show_counts(console: Console, comparison: Comparison) -> None:
    console.print()
    before, after = comparison.verdicts_before, comparison.verdicts_after
    table = columns_table("groups", "as recorded", *(["as changed"] if comparison.is_changed else []))
    for verdict in sorted(before | after):
        numbers = before[verdict], after[verdict]
        table.add_row(verdict, *(f"{number:,}" for number in numbers[: 1 + comparison.is_changed]))
    show_table(console, table)


def _show_changes(console: Console, comparison: Comparison) -> None:
    console.print()
    facts = {
        "verdicts": _verdicts_text(comparison.kinds_of_change()),
        "rewards": _move_text(comparison.rewards),
        "advantages": _move_text(comparison.advantages),
    }
    show_table(console, facts_table(facts))
    if not comparison.changes:
        return
    console.print()
    table = columns_table("group", "instance", "epoch", "as recorded", "as changed", "reward", "advantages move by")
    first = sorted(comparison.changes, key=_importance)[:MOST_SHOWN]
    for change in first:
        table.add_row(*_cells(change))
    show_table(console, table)
    _say_more(console, len(comparison.changes))
    for change in first:
        if change.is_of_verdict and change.detail:
            console.print(f"\n{change.group_id}: {change.detail.rstrip()}", markup=False, soft_wrap=True)
            break


def _importance(change: ChangedGroup) -> tuple[bool, float]:
    return not change.is_of_verdict, -change.largest_advantage_change


def _cells(change: ChangedGroup) -> list[str]:
    before, after = _number(change.mean_reward_before), _number(change.mean_reward_after)
    reward = before if before == after else f"{before} → {after}"
    moved = f"{change.largest_advantage_change:.3g}" if change.largest_advantage_change else "-"
    which = [change.group_id, _id(change.instance_id), str(change.epoch)]
    return [*which, str(change.before), str(change.after), reward, moved]


def _verdicts_text(kinds: "Counter[tuple[str, str]]") -> str:
    if not kinds:
        return "no group changes"
    changes = (f"{number:,} {before} → {after}" for (before, after), number in kinds.most_common())
    change = "1 group changes" if kinds.total() == 1 else f"{kinds.total():,} groups change"
    return f"{change}: {', '.join(changes)}"


def _move_text(move: Move) -> str:
    if not move.num_both:
        return "no sample has one both as recorded and as changed"
    mean = " → ".join(map(_number, move.means()))
    if not move.num_moved:
        return f"none of {move.num_both:,} changes; mean {mean}"
    return f"{move.num_moved:,} of {move.num_both:,} change, by at most {_number(move.largest)}; mean {mean}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 6) + 0.0:.4g}"


def _id(instance_id: Any) -> str:
    return repr(instance_id)


def _say_more(console: Console, number: int) -> None:
    if number > MOST_SHOWN:
        console.print(f"and {number - MOST_SHOWN:,} more: --json has all of them", markup=False, style="dim")
