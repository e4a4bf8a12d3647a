"""``forebay export``: writes rollouts in the formats of other tools."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.core.errors import InvalidInput
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url
from forebay.server.cli.output import echo, print_json

MOST_NAMED = 20
"""Maximum number of groups without samples to list."""

Source = Annotated[str, typer.Argument(metavar="RUN|FILE", help="Id or name of a run, or the file of a recording.")]


def command(
    source: Source,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A new file; for atif, a new folder.")],
    target: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="atif, parquet, jsonl, or the format of an installed plugin.")
    ],
    steps: Annotated[
        str, typer.Option("--steps", metavar="A-B,C", help="Only groups in the batches of these steps.")
    ] = "",
    groups: Annotated[
        str | None,
        typer.Option("--groups", metavar="A,B", help="Only these groups: ids, beginnings of ids, or instances."),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="Only rollouts with at least this reward.")
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Write the rollouts of a run for other tools: ATIF trajectories, a Parquet table, or JSON Lines.

    Nothing is ever overwritten. Groups whose samples were removed or are damaged are counted and left out; then the
    exit code is 1. `forebay recording export` writes a file to replay or compare, `forebay trace export` the times of
    a run for Perfetto or OpenTelemetry.
    """
    from forebay.replay.exporters.exporter import export, find_exporter
    from forebay.replay.exporters.rollouts import RolloutReader
    from forebay.replay.options import parse_steps
    from forebay.replay.recording_export import check_new
    from forebay.server.cli.recordings.recording_download import open_recording_of

    check_new(output)
    exporter = find_exporter(target)
    if steps:
        parse_steps(steps, "--steps")
    names = [name.strip() for name in (groups or "").split(",") if name.strip()]
    if groups is not None and not names:
        raise InvalidInput("--groups is empty", hint="give groups separated by commas", field="groups")
    # A download is as large as its bodies, which a temporary file system in memory may not hold.
    beside = output.absolute().parent
    with open_recording_of(source, url, token, steps, names, folder=beside, partial=True) as recording:
        rollouts = RolloutReader(recording, steps, names, min_reward)
        try:
            num_rollouts, num_samples = export(rollouts, exporter, output)
        finally:
            for group_id, reason in list(rollouts.left_out.items())[:MOST_NAMED]:
                echo(f"left out: group {group_id}: {reason}", err=True)
    _show(output, num_rollouts, num_samples, rollouts.left_out, as_json)
    if rollouts.left_out:
        raise typer.Exit(1)


def _show(output: Path, num_rollouts: int, num_samples: int, left_out: dict[str, str], as_json: bool) -> None:
    if as_json:
        numbers = {"num_rollouts": num_rollouts, "num_samples": num_samples}
        print_json({"output": str(output), **numbers, "left_out": left_out})
        return
    echo(str(output))
    echo(f"rollouts: {num_rollouts:,}, samples: {num_samples:,}", err=True)
    if left_out:
        echo(f"left out: the samples of {len(left_out):,} groups, which were removed or are damaged", err=True)
