"""A read: from a trainer's request to a leased batch and its encoded rows.

1. ``delivery.py`` takes the request and serves waiting readers in order of arrival.
2. ``selection.py`` defines the request (``ReadRequest``) and chooses groups until there are enough. Before that,
   ``judging.py`` asks ``is_valid_group`` about all changed groups, and ``staleness.py`` discards stale ones.
3. ``judging.py`` makes rows of each candidate: ``filter_item``, ``normalize_group_data``, ``pad_group_data``.
4. ``delivery.py`` leases the chosen groups (``leases/``), and makes the meta info while the lease is being stored.
5. ``reply_rows.py`` makes the rows: stored bodies with new rewards, which the store sends without decoding them.

The result is a ``LeasedBatch``. The route that sends it reports whether it ``arrived`` or was ``abandoned``
(``leases/``), or that it is ``broken`` because a body cannot be read.
"""
