"""``forebay recording``: exports a run to a file; shows, verifies and compares such files."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from forebay.server.cli.client import ServerClient
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url
from forebay.server.cli.output import echo, facts_table, make_console, print_json, show_table
from forebay.server.cli.run_commands import RunName

app = typer.Typer(no_args_is_help=True, help="Export a run to a file, and inspect such files.")

FileName = Annotated[Path, typer.Argument(metavar="FILE", help="The file of a recording: NAME.fbr.")]
Side = Annotated[str, typer.Argument(metavar="RUN|FILE", help="Id or name of a run, or the file of a recording.")]


@app.command("export", short_help="Write a run into a file.")
def export(
    run: RunName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file: NAME.fbr.")],
    steps: Annotated[
        str, typer.Option("--steps", metavar="A-B,C", help="Only the groups of the batches of these steps.")
    ] = "",
    url: Url = DEFAULT_URL,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Write a run into a file: its groups and batches, and every sample, byte for byte. No file is ever overwritten.

    `forebay export` writes rollouts as ATIF, Parquet or JSON Lines, `forebay trace export` the times of a run.

    If the disk is damaged and a body cannot be read, its group is exported without samples and listed. The file is
    still written, and the exit code is 1.
    """
    from forebay.server.cli.recordings.recording_download import export_run
    from forebay.server.cli.recordings.recording_summary import counts

    with ServerClient(url, token) as server:
        made = export_run(server, run, file, steps)
    for each in made.left_out:
        echo(f"left out: the samples of {each}", err=True)
    if as_json:
        print_json({"file": str(file), "num_bytes": file.stat().st_size, **counts(made)})
    else:
        echo(str(file))
        echo(f"groups: {made.num_groups:,}, samples: {made.num_samples:,}, batches: {made.num_batches:,}", err=True)
    if made.left_out:
        echo(f"{file} is complete except for the samples of {len(made.left_out):,} groups, listed above", err=True)
        raise typer.Exit(1)


@app.command("show", short_help="Show what is in a recording.")
def show(file: FileName, as_json: AsJson = False) -> None:
    """Show the run that a file records, and counts of its groups by state, samples, steps and engine calls."""
    from forebay.replay.recording import Recording
    from forebay.server.cli.recordings.recording_summary import facts, summary

    with Recording.open(file) as recording:
        found = summary(recording)
    if as_json:
        print_json(found)
    else:
        show_table(make_console(), facts_table(facts(found)))


@app.command("verify", short_help="Check that a recording is undamaged.")
def verify(file: FileName, as_json: AsJson = False) -> None:
    """Read a whole file and list all damage. The exit code is 1 if there is any."""
    from forebay.replay.errors import RecordingDamaged
    from forebay.replay.recording import Damage, Recording

    try:
        with Recording.open(file) as recording:
            damage = recording.verify()
    except RecordingDamaged as error:
        if not error.place:
            raise
        damage = [Damage.of(error)]
    if as_json:
        print_json({"file": str(file), "damage": [{"place": each.place, "reason": each.reason} for each in damage]})
    else:
        echo("\n".join(map(str, damage)) or f"{file} is undamaged")
    raise typer.Exit(1 if damage else 0)


@app.command("diff", short_help="Show how two recordings differ.")
def diff(one: Side, other: Side, url: Url = DEFAULT_URL, token: Token = "", as_json: AsJson = False) -> None:
    """Count how many groups, samples, tokens and rewards of two runs, or recordings, differ. Exits with 1 if any do.

    Groups are paired by their ids. The first difference of each kind follows: code, settings, groups, samples, rewards,
    tokens, bodies. Ignored are names, addresses, times, how the processes worked, and how far a trainer has read.
    """
    from forebay.replay.recording_differences import COUNTED, compare_recordings
    from forebay.server.cli.recordings.recording_download import open_recording_of

    with ExitStack() as stack:
        sides = [stack.enter_context(open_recording_of(each, url, token)) for each in (one, other)]
        found = compare_recordings(*sides)
    for each in found.not_compared.values():
        echo(f"not compared, since neither side has them: the samples of {each}", err=True)
    different, compared, first = found.num_different, found.num_compared, found.in_words(one, other)
    if as_json:
        counts = {"num_different": {kind: different[kind] for kind in COUNTED}, "num_compared": compared}
        print_json({"is_equal": not first, **counts, "first": first, "not_compared": list(found.not_compared)})
    elif first:
        of_all = [f"{kind} {different[kind]:,} of {compared[kind]:,}" for kind in ("groups", "samples")]
        echo(f"differ: {', '.join(of_all)}, tokens {different['tokens']:,}, rewards {different['rewards']:,}")
        echo("\n".join(first.values()))
    else:
        echo(f"no difference in {compared['groups']:,} groups and {compared['samples']:,} samples")
    raise typer.Exit(1 if first else 0)
