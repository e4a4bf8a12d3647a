"""``forebay recording``: bring a run into a file, look at it, check it, compare it."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from forebay.server.cli.client import ServerClient
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url
from forebay.server.cli.output import echo, facts_table, make_console, print_json, show_table
from forebay.server.cli.run_commands import RunName

app = typer.Typer(no_args_is_help=True, help="Bring a run into a file, and look into such files.")

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
    """Write a run into a file: its groups and batches, and every sample, byte for byte. No file is ever overwritten."""
    from forebay.server.cli.recordings.recording_download import export_run

    with ServerClient(url, token) as server:
        made = export_run(server, run, file, steps)
    if as_json:
        print_json({"file": str(file), "num_bytes": file.stat().st_size, **_counts(made)})
        return
    echo(str(file))
    echo(f"groups: {made.num_groups:,}, samples: {made.num_samples:,}, batches: {made.num_batches:,}", err=True)


@app.command("show", short_help="Tell what is in a recording.")
def show(file: FileName, as_json: AsJson = False) -> None:
    """Tell which run a file is a recording of, and how much it has: groups by state, samples, steps, engine calls."""
    from forebay.replay.recordings.recording import Recording
    from forebay.server.cli.recordings.recording_summary import facts, summary

    with Recording.open(file) as recording:
        found = summary(recording)
    if as_json:
        print_json(found)
    else:
        show_table(make_console(), facts_table(facts(found)))


@app.command("verify", short_help="Check that a recording is what was written.")
def verify(file: FileName, as_json: AsJson = False) -> None:
    """Read a file, byte by byte, and name all that is not what was written. The exit code is 1 if there is any."""
    from forebay.replay.recordings.recording import Recording

    with Recording.open(file) as recording:
        damage = recording.verify()
    if as_json:
        print_json({"file": str(file), "damage": [{"place": each.place, "reason": each.reason} for each in damage]})
    else:
        echo("\n".join(map(str, damage)) or f"{file} is what was written")
    raise typer.Exit(1 if damage else 0)


@app.command("diff", short_help="Tell where two recordings first differ.")
def diff(one: Side, other: Side, url: Url = DEFAULT_URL, token: Token = "", as_json: AsJson = False) -> None:
    """Tell where two runs, or recordings of runs, first differ. The exit code is 1 if they do.

    What was asked is compared, then groups and what became of them, samples, and bodies but for `replayed_from`; names,
    times, and how far a trainer has read are not.
    """
    from forebay.replay.recordings.recording_differences import find_difference
    from forebay.server.cli.recordings.recording_download import open_recording_of

    with ExitStack() as stack:
        sides = [stack.enter_context(open_recording_of(each, url, token)) for each in (one, other)]
        found = find_difference(*sides)
    if as_json:
        where = None if found is None else {"place": found.place, "path": found.difference.path}
        print_json({"is_equal": found is None, "difference": where, "text": found and found.in_words(one, other)})
    else:
        echo("they tell the same" if found is None else found.in_words(one, other))
    raise typer.Exit(0 if found is None else 1)


def _counts(made: object) -> dict[str, int]:
    names = ("num_groups", "num_samples", "num_batches")
    return {name: getattr(made, name) for name in names}
