"""``forebay show``: the groups of a run, the rollouts of a group, or one rollout; and who wrote a text."""

import re
from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from forebay.core import binary_sample
from forebay.core.errors import InvalidInput
from forebay.core.outcome import RewardTally
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url
from forebay.server.cli.output import columns_table, echo, facts_table, make_console, print_json, show_table
from forebay.server.cli.recordings.export_command import Source
from forebay.server.search.text_index import texts_of

if TYPE_CHECKING:
    from forebay.replay.exporters.atif_steps import StepTokens
    from forebay.replay.exporters.rollouts import ExportedRollout, RolloutReader
    from forebay.replay.recording import Recording

Json = dict[str, Any]
MOST_SHOWN = 100
"""Groups, or samples with a text, that are listed without ``--json``."""
COLUMN = 36
"""Characters of a column of one rollout, and of an excerpt in three lines of it."""
LOGPROB_STYLES = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (float("-inf"), "red"))
"""The style of tokens with at least this logprob."""


class TokenColours(StrEnum):
    """What is shown of each token."""

    MASK = "mask"
    LOGPROB = "logprob"


def command(
    source: Source,
    group: Annotated[str, typer.Argument(metavar="[GROUP]", help="Id of a group, its beginning, or an instance.")] = "",
    slot: Annotated[int | None, typer.Argument(metavar="[SLOT]", help="A slot of the group.")] = None,
    pattern: Annotated[
        str, typer.Option("--grep", metavar="REGEX", help="In how many samples a text occurs, and their mean reward.")
    ] = "",
    tokens: Annotated[
        TokenColours | None, typer.Option("--tokens", help="With SLOT: also show the token ids of each turn.")
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Show the groups of a run by how far their rewards differ; the rollouts of a group; or one rollout, turn by turn.

    --grep searches what models and tools wrote, not prompts.
    """
    from forebay.client.calls.flow import read_json
    from forebay.replay.exporters.rollouts import RolloutReader
    from forebay.server.cli.recordings.recording_download import open_recording_of

    if tokens and slot is None:
        raise InvalidInput("--tokens needs a rollout", hint="forebay show RUN GROUP SLOT --tokens mask")
    names, bodies = [group] if group else [], bool(group or pattern)
    with open_recording_of(source, url, token, groups=names, partial=True, bodies=bodies) as recording:
        reader = RolloutReader(recording, groups=names)
        if pattern:
            _show_search(searched(reader, pattern), as_json)
        elif not group:
            _show_rows(groups_by_spread(recording), as_json)
        else:
            rollouts = [each for each in reader if slot is None or each.samples[0].row.slot == slot]
            if not rollouts and not reader.left_out:
                hint = f"`forebay show {source} {group}` lists its rollouts"
                raise InvalidInput(f"group {group} has no rollout{'' if slot is None else f' {slot}'}", hint=hint)
            if as_json:
                samples = [(each, rollout.recorded(each)) for rollout in rollouts for each in rollout.samples]
                print_json([read_json(binary_sample.as_json(each.body)) | recorded for each, recorded in samples])
            elif slot is None:
                for _, of_group in groupby(rollouts, key=lambda each: each.group.group_id):
                    _show_side_by_side(list(of_group))
            else:
                for rollout in rollouts:
                    _show_rollout(rollout, tokens)
    for group_id, reason in reader.left_out.items():
        echo(f"left out: group {group_id}: {reason}", err=True)
    if reader.left_out:
        raise typer.Exit(1)


def groups_by_spread(recording: "Recording") -> list[Json]:
    """Each group with the number and range of its rewards, those with the largest range first."""
    found = []
    for group in recording.groups():
        stored = [] if group.group_id in recording.left_out else recording.samples(group.group_id)
        mains = [each.row for each in stored if each.row.outcome == "member" and not each.row.fork]
        rewards = RewardTally()
        for reward in (row.reward for row in mains if row.reward is not None):
            rewards.note(reward)
        own = {name: getattr(group, name) for name in ("group_id", "instance_id", "epoch", "state", "reason")}
        counts = {"samples": len(mains), "failed": len(mains) - rewards.num}
        found.append(own | counts | {name: value for name, value in rewards.as_json().items() if name != "num"})
    return sorted(found, key=lambda each: (each["max"] or 0.0) - (each["min"] or 0.0), reverse=True)


def _show_rows(rows: Sequence[Json], as_json: bool) -> None:
    """Print the first rows as a table, or all as JSON."""
    if as_json:
        print_json(rows)
        return
    table = columns_table(*(rows[0] if rows else ()))
    for row in rows[:MOST_SHOWN]:
        table.add_row(*(_number(value) if isinstance(value, float | None) else str(value) for value in row.values()))
    show_table(make_console(), table)
    if len(rows) > MOST_SHOWN:
        echo(f"and {len(rows) - MOST_SHOWN:,} more, which --json lists")


def _show_side_by_side(rollouts: Sequence["ExportedRollout"]) -> None:
    """The rollouts of a group as columns by reward, as many as the terminal is wide, aligned by reply."""
    console, group = make_console(), rollouts[0].group
    title = f"group {group.group_id}, epoch {group.epoch}, {group.state} {group.reason}"
    console.print(Text(title.rstrip(), style="bold"), soft_wrap=True)
    ordered = sorted(rollouts, key=lambda each: (each.reward is None, -(each.reward or 0.0)))
    size = max(1, (console.width - 8) // COLUMN)
    for first in range(0, len(ordered), size):
        columns = [_column(each) for each in ordered[first : first + size]]
        table = columns_table("", *(column.pop(0) for column in columns))
        for number in range(max(map(len, columns))):
            label = ("reward", "outcome", "tokens")[number] if number < 3 else f"reply {number - 2}"
            table.add_row(label, *(column[number] if number < len(column) else "" for column in columns))
        console.print(table, markup=False)


def _column(rollout: "ExportedRollout") -> list[str]:
    main = rollout.samples[0]
    replies = [each for each in main.fields["messages"] if isinstance(each, dict) and each.get("role") == "assistant"]
    excerpts = [" ".join(" ".join(texts_of(reply)).split())[: 3 * COLUMN] for reply in replies]
    outcome = f"{main.row.rollout_outcome} {main.row.error}"[: 3 * COLUMN]
    forks = f", {len(rollout.samples) - 1} forks" if len(rollout.samples) > 1 else ""
    title = f"slot {main.row.slot}" if main.row.outcome == "member" else main.row.outcome
    return [title, _number(rollout.reward), outcome, f"{main.arrays.num_tokens:,}{forks}", *excerpts]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _show_rollout(rollout: "ExportedRollout", tokens: TokenColours | None) -> None:
    from forebay.replay.exporters.atif_steps import StepTokens

    console = make_console()
    for sample in rollout.samples:
        recorded = rollout.recorded(sample) | {"reward_parts": sample.fields.get("reward_parts", "")}
        show_table(console, facts_table(recorded))
        for number, message in enumerate(sample.fields["messages"]):
            role = message.get("role") if isinstance(message, dict) else "?"
            console.print(Text(f"── {number} {role}", style="bold"))
            console.print(Text("\n".join(texts_of(message))), soft_wrap=True)
        for number in range(len((found := StepTokens(sample)).turns) if tokens else 0):
            console.print(Text(f"── tokens of turn {number + 1}", style="bold"))
            console.print(_token_text(found, number, tokens), soft_wrap=True)
        others = (each for each in sample.fields.items() if each[0] != "messages")
        if rest := {name: value for name, value in others if recorded.get(name, ...) != value}:
            console.print(Text("── other fields", style="bold"))
            print_json(rest)


def _token_text(tokens: "StepTokens", number: int, by: TokenColours | None) -> Text:
    """The ids of a turn after those of its prompt that the turn before did not have; untrained ids in parentheses."""
    start, end, _ = tokens.turns[number]
    text = Text()
    for at in range(tokens.turns[number - 1].end if number else 0, end):
        shown = str(tokens.ids[at]) if tokens.mask[at] else f"({tokens.ids[at]})"
        style = "green underline" if tokens.mask[at] else "dim"
        if by is TokenColours.LOGPROB and tokens.logprobs is not None and at >= start:
            shown += f":{tokens.logprobs[at]:.2f}"
            style = next((style for least, style in LOGPROB_STYLES if tokens.logprobs[at] >= least), "")
        text.append(shown, style=style).append(" ")
    return text


def searched(reader: "RolloutReader", pattern: str) -> Json:
    """How many samples have a text that matches, and their rewards; forks count with their main sample."""
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise InvalidInput(f"--grep: {pattern!r} is not a regular expression: {error}") from None
    tallies = {True: RewardTally(), False: RewardTally()}
    found: list[Json] = []
    num_samples = 0
    for num_samples, rollout in enumerate(reader, 1):  # noqa: B007 - read after the loop
        messages = (each for sample in rollout.samples for each in sample.fields["messages"])
        written = (each for each in messages if isinstance(each, dict) and each.get("role") in ("assistant", "tool"))
        has_text = any(search(text) for message in written for text in texts_of(message))
        if rollout.reward is not None:
            tallies[has_text].note(rollout.reward)
        if has_text:
            row = rollout.samples[0].row
            found.append({"group_id": row.group_id, "slot": row.slot, "uid": row.uid, "reward": row.reward})
    counts = {"pattern": pattern, "num_samples": num_samples, "num_with": len(found)}
    rewards = {"rewards_with": tallies[True].as_json(), "rewards_without": tallies[False].as_json()}
    return counts | rewards | {"samples": found}


def _show_search(found: Json, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    share = 100 * found["num_with"] / max(1, found["num_samples"])
    echo(f"in {found['num_with']:,} of {found['num_samples']:,} samples ({share:.1f} %)")
    means = [_number(found[name]["mean"]) for name in ("rewards_with", "rewards_without")]
    echo(f"mean reward: {means[0]} with it, {means[1]} without it")
    _show_rows(found["samples"], as_json)
