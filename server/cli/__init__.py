"""The command line: ``forebay``."""

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    # Imported here, so that the processes which the command line starts need not load all of it.
    from forebay.server.cli.app import run

    run()
