"""Records on disk: which rows exist, and their encoding.

``rows.py`` defines the stored rows, ``recording_rows.py`` those only in recordings. ``notes.py`` has the notes of a
trainer about samples. ``log_records.py`` encodes rows and a body as one record with checksums, and ``log_scan.py``
reads a segment of them. ``reward_place.py`` sets rewards in bodies. ``record_file.py`` is a file that is a log of its
own, and ``disk_files.py`` has the file operations.
"""
