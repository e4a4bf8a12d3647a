"""Batches that are, or were, with a trainer.

``leases.py``: a batch is leased when a reply begins to carry it, its time begins with the last byte, and it ends by an
ack, a release, or expiry (``deadlines.py``), which make its groups acked or ready. A late ack counts while nobody else
has the groups. ``checkpoints.py`` is what the trainer asks for with them: fixing batches to a checkpoint, and the
rewind to one.

All that is stored of it are rows of batches, groups and checkpoints; a lease itself is in memory. After a restart
(``resume_with``) leases begin anew, but for those of slime's routes, whose replies were cut off.
"""
