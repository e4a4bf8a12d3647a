"""The process that a run is.

The server starts ``monitor.py``, which starts ``main.py`` in a session of its own, writes what it prints to the log of
the run (``run_logs.py``), and kills the whole process group when the server hangs up. ``main.py`` reads its ``spec.py``
(module and payload) from the server, loads the run's ``code_copy.py`` of the generator, calls ``run_rollout`` and sends
how that ended to the server (``forebay.core.processes``). What agents that are commands print has files of its own,
which ``run_logs.py`` knows as well.
Both die with their parent: see ``forebay.core.child_process``.
"""
