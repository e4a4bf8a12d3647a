"""Records as they lie on disk: what rows there are, and their bytes.

``rows.py`` says what is stored. ``log_records.py`` makes rows and a body one record with checksums, ``log_scan.py``
reads a file of records, and ``disk_files.py`` has the few things that are done with files.
"""
