"""A read: from a trainer's request to a leased batch and its encoded rows.

1. ``delivery.py`` takes the request and lets readers take turns, whoever came first being served first.
2. ``selection.py`` says what was asked for (``ReadRequest``), and looks for groups until they are enough. Before that,
   ``judging.py`` asks ``is_valid_group`` about all that changed, and ``staleness.py`` discards what is too old.
3. Of each group looked at, ``judging.py`` makes rows: ``filter_item``, ``normalize_group_data``, ``pad_group_data``.
4. ``delivery.py`` leases the chosen groups (``leases/``), and makes the meta info while that is on its way to the disk.
5. ``reply_rows.py`` makes the rows: stored bodies with other rewards, which the store sends without decoding them.

Out goes a ``LeasedBatch``. The route that sends it says afterwards whether it ``arrived`` or was ``abandoned``
(``leases/``), or that it is ``broken``, when a body cannot be read.
"""
