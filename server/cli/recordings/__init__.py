"""``forebay recording``, ``export`` and ``show``: commands that read a run as the file of a recording.

``recording_commands`` exports a run to a file, and inspects such files. ``export_command`` writes rollouts for other
tools, and ``show_command`` shows them. ``recording_download`` downloads a run from the server into a file, for these
and for any command that takes a run or a file. ``recording_summary`` formats the output of ``recording show``.
"""
