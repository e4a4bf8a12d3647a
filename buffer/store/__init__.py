"""Stores of records. ``abc.py`` specifies every store; ``core/records`` has the rows and their encoding.

``memory.py`` keeps data in dictionaries; ``journal.py`` in a data directory (``data_dir.py``), in two forms:

- The log is the source of truth. ``log_segments.py`` appends records to files, and cuts or sets
  aside damaged ones. ``log_writer.py`` is the only thread that writes: it commits everything queued with one
  ``fdatasync``, and answers. On a full disk, ``reserve.py`` has room for acknowledgements.
- The index (SQLite) answers queries. ``index.py`` follows the log in the same thread when that is idle;
  ``index_rows.py`` defines its tables, ``index_queries.py`` reads them, each time over its own connection.
  It can be deleted at any time; ``index_damage.py`` detects damage and sets a damaged index aside.

Bodies are only in the log. ``bodies.py`` reads them, neighbours with one call, and verifies each one.
``send_bodies.py`` sends them and verifies the next ones meanwhile. ``removal.py`` rewrites the information that only
one segment has, before the segment is deleted.

The path of a write: ``journal`` → ``log_records`` → ``log_writer`` (queue) → ``log_segments`` → ``log_writer`` → its
caller, through the event loop; and soon afterwards the index.
"""
