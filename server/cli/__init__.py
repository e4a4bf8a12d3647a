"""The command line: ``forebay``.

``command_line.py`` puts the commands together, runs one, and turns errors into a line, a hint and an exit code: 2 for
wrong input, 1 for what the server or the machine refuses. Each command stands in the module that is named after it
(``serve_commands``, ``start_command``, ``run_commands``, ``gc_command``, ``generator_commands``, ``profile_command``,
``simulate_command``, ``trace_commands``, ``compare/``, ``demo/``, ``recordings/``): it reads its flags
(``options.py``), asks the server (``client.py``, over ``client/calls``, which finds the run that is meant, too)
where it has to, and shows the answer (``output.py``; ``run_facts.py`` for a run, ``progress.py`` for one that goes on,
``profile_summary.py`` for where its time went, ``simulate_summary.py`` for other schedulers) as a table for people or,
with ``--json``, as it came. Commands about a log find it with ``trace_source.py``, which fetches what
only a server has. ``own_token.py`` hides the token that a command was given from other processes.
"""

from forebay.core.child_process import skip_httpx_command
from forebay.server.cli.own_token import hide_own_token

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    hide_own_token()  # first: what follows takes a while
    skip_httpx_command()
    # Imported here, so that the processes which the command line starts need not load all of it.
    from forebay.server.cli.options import loading

    with loading():
        from forebay.server.cli.command_line import run

    run()
