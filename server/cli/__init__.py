"""The command line: ``forebay``."""

from forebay.server.cli.options import loading

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    # Imported here, so that the processes which the command line starts need not load all of it.
    with loading():
        from forebay.server.cli.command_line import run

    run()
