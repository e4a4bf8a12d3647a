"""The run process and its monitor.

The server starts ``monitor.py``, which starts ``main.py`` in its own session. The monitor writes the session's output
to the run's log (``run_logs.py``), and kills the session when the server hangs up. ``main.py`` receives its
``spec.py`` (module and payload) from the server and loads the run's copy of the generator (``code_copy.py``). It calls
``run_rollout`` and reports the outcome to the server (``forebay.core.processes``). Separate files keep the output of
agents that are commands. Both processes die with their parent: see ``forebay.core.child_process``.
"""
