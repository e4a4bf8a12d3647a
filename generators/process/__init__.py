"""The run process and its monitor.

The server starts ``monitor.py``, which starts ``main.py`` in its own session, writes its output to the run's log
(``run_logs.py``), and kills the session when the server hangs up. ``main.py`` receives its ``spec.py`` (module and
payload) from the server, loads the run's copy of the generator (``code_copy.py``), calls ``run_rollout`` and reports
the outcome to the server (``forebay.core.processes``). The output of agents that are commands goes to separate files,
which ``run_logs.py`` manages as well. Both processes die with their parent: see ``forebay.core.child_process``.
"""
