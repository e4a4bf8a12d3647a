"""The command line: ``forebay``.

``command_line.py`` puts the commands together, runs one, and turns errors into a line, a hint and an exit code: 2 for
wrong input, 1 for what the server or the machine refuses. Each command stands in the module that is named after it
(``serve_commands``, ``start_command``, ``run_commands``, ``gc_command``, ``generator_commands``, ``demo/``): it reads
its flags (``options.py``), asks the server (``client.py``, over ``client/calls``; ``run_lookup.py`` finds the run that
is meant) where it has to, and shows the answer (``output.py``; ``run_facts.py`` for a run, ``progress.py`` for one that
goes on) as a table for people or, with ``--json``, as it came.
"""

from forebay.server.cli.options import loading

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    # Imported here, so that the processes which the command line starts need not load all of it.
    with loading():
        from forebay.server.cli.command_line import run

    run()
