"""The command line: ``forebay``.

``command_line.py`` assembles the commands, runs one, and turns errors into a line, a hint and an exit code: 2 for wrong
input, 1 for what the server or the machine refuses. Each command is in the module named after it (``serve_commands``,
``start_command``, ``run_commands``, ``gc_command``, ``generator_commands``, ``profile_command``,
``simulate_command``, ``mismatch_command``, ``bias_command``, ``trace_commands``, ``compare/``,
``demo/``, ``recordings/``). A command reads its flags (``options.py``) and calls the server (``client.py``, over
``client/calls``, which also resolves a run's name). It prints the answer with ``output.py`` as a table for people or,
with ``--json``, unchanged.
``run_facts.py`` formats a run, ``progress.py`` a run in progress, ``profile_summary.py`` where its time went, and
``simulate_summary.py`` other schedulers. ``bias.py`` compares delivered groups with what was not delivered. Commands
about a log find it with ``trace_source.py``, which downloads logs that only a server has. ``own_token.py`` hides the
token given to a command from other processes.
"""

import sys

from forebay.core.child_process import skip_httpx_command
from forebay.server.cli.own_token import hide_own_token

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    hide_own_token()  # first: the rest takes a while
    skip_httpx_command()
    # Imported here, so that processes started by the command line need not load all of it.
    try:
        from forebay.server.cli.options import loading

        with loading():
            from forebay.server.cli.command_line import run

        run()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("forebay"):
            raise
        sys.exit(f"error: {error.name} is not installed: pip install 'forebay[server]'")
