"""Stores of records. ``abc.py`` says what every store promises; ``core/records`` has the rows and their bytes.

``memory.py`` keeps it in dictionaries; ``journal.py`` in a data directory (``data_dir.py``), in two forms:

- The log is the only truth. ``log_segments.py`` puts records one behind the other into files, and cuts or sets
  aside what is damaged. ``log_writer.py`` is the one thread that writes: it commits all that waits with one
  ``fdatasync``, and answers. On a full disk, ``reserve.py`` has room for acknowledgements.
- The index (SQLite) answers questions. ``index.py`` follows the log in the same thread, when nothing else is to do;
  ``index_rows.py`` says what its tables hold, ``index_queries.py`` reads them, each time over a connection of its own.
  It can be deleted at any time; ``index_damage.py`` says what counts as damage, and puts a damaged one aside.

Bodies lie in the log only. ``bodies.py`` reads them, neighbours with one call, and proves each to be what was written;
``send_bodies.py`` sends them, the next ones proved meanwhile. ``removal.py`` writes again what a
segment alone tells, before the segment goes for good.

A write passes: ``journal`` → ``log_records`` → ``log_writer`` (queue) → ``log_segments`` → ``log_writer`` → its
caller, by the event loop; and the index soon after.
"""
