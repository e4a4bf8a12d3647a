"""``forebay recording``: exports a run to a file, and inspects such files.

``recording_commands`` has the commands. ``recording_download`` downloads a run from the server into a file, for
``export`` and for any command that takes a run or a file. ``recording_summary`` formats the output of ``show``.
"""
