"""A run's start.

``run_start`` has its payload and lists of ids, stored separately from what changes with each report. ``input_file``
opens the files that a payload names, both in the server and in run processes. ``payload_text`` rejects texts that
files and databases cannot hold.
"""
