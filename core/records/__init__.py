"""Records as they lie on disk: what rows there are, and their bytes.

``rows.py`` says what is stored, ``recording_rows.py`` what a recording has besides. ``log_records.py`` makes rows and a
body one record with checksums, ``log_scan.py`` reads a segment of them, ``record_file.py`` is a file that is a log of
its own, and ``disk_files.py`` has the few things that are done with files.
"""
