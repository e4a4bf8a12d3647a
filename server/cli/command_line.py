"""The command ``forebay`` and its subcommands."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from forebay.core.errors import ForebayError, InvalidInput
from forebay.server.cli import (
    bias_command,
    demo,
    gc_command,
    generator_commands,
    mismatch_command,
    profile_command,
    run_commands,
    serve_commands,
    simulate_command,
    start_command,
    trace_commands,
)
from forebay.server.cli.compare import compare_command
from forebay.server.cli.output import echo, show_error
from forebay.server.cli.recordings import export_command, recording_commands, show_command

USAGE_EXIT_CODE = 2

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="The rollout buffer for agent RL.",
)
app.command("serve")(serve_commands.serve)
app.command("start")(start_command.command)
app.command("status")(run_commands.status)
app.command("stop")(run_commands.stop)
app.command("gc", short_help="Remove stored samples that are no longer needed.")(gc_command.command)
app.command("profile", short_help="Show why steps were slow.")(profile_command.command)
app.command("bias", short_help="Compare what the trainer received with what it did not.")(bias_command.command)
app.command("mismatch", short_help="Compare the trainer's logprobs with the sampler's.")(mismatch_command.command)
app.command("show", short_help="Show groups and rollouts, or search them.")(show_command.command)
app.command("export", short_help="Write rollouts as ATIF, Parquet or JSON Lines.")(export_command.command)
app.command("simulate", short_help="Try schedulers on a recorded run, in virtual time.")(simulate_command.command)
app.command("compare", short_help="Judge a recording again with other hooks, rewards or settings.")(
    compare_command.command
)
app.add_typer(generator_commands.app, name="generators")
app.add_typer(serve_commands.engine_app, name="engine")
app.add_typer(trace_commands.app, name="trace")
app.add_typer(recording_commands.app, name="recording")
app.command("demo", short_help="Try everything together on this machine.")(demo.command)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        echo(f"forebay {version('forebay')}")
        raise typer.Exit


@app.callback()
def _root(
    is_version_asked: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """The rollout buffer for agent RL: drop in a generator, read finished groups over HTTP."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Run one command. Ends with SystemExit: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    try:
        app(arguments)
    except InvalidInput as error:
        show_error(error)
        raise SystemExit(USAGE_EXIT_CODE) from None
    except (ForebayError, OSError) as error:  # anything else is a defect, and its traceback should be shown
        show_error(error)
        # Only who has the run knows whether a step or group that was asked for exists.
        is_usage = getattr(error, "field", None) in ("steps", "groups")
        raise SystemExit(USAGE_EXIT_CODE if is_usage else 1) from None
