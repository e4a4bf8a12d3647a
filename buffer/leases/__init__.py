"""Batches that a trainer has, or had.

``leases.py``: a batch is leased when a reply starts to carry it, and its time starts after the last byte. It ends
with an ack, a release, or expiry (``deadlines.py``), which make its groups acked or ready. A late ack counts unless
another batch has the groups. ``checkpoints.py`` fixes batches to a checkpoint, and rewinds to one.

Only rows of batches, groups and checkpoints are stored; a lease itself is in memory. After a restart (``resume_with``)
leases start again, except those of slime's routes, whose replies were cut off.
"""
