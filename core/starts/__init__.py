"""A run's start.

``run_start`` has its payload and lists of ids, stored separately from what changes with each report. ``input_file``
opens the files that a payload names, both in the server and in run processes. ``payload_text`` rejects texts that
files and databases cannot hold. ``asked_arrays`` parses which arrays per token a run asks its engines for.
``evaluate`` has the evaluations that a start declares, and makes the start of each.
"""
