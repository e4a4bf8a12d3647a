"""``forebay recording``: a run in a file, and what is in such files.

``recording_commands`` has the commands. ``recording_download`` brings a run from the server into a file, for
``export``, and for whatever takes a run or a file. ``recording_summary`` is what ``show`` writes.
"""
